"""A peak of memory begins anew where a test says so."""

from tests.peaks import peak_kib

MIB = 1 << 20


def test_peak_memory_is_measured_from_the_last_reset():
    large = bytearray(b"1") * (200 * MIB)
    assert peak_kib() > 200 << 10
    del large
    before = peak_kib(reset=True)
    assert peak_kib() - before < 20 << 10
    large = bytearray(b"1") * (100 * MIB)
    assert peak_kib() - before > 90 << 10
    del large
