"""One replica: what it is told, what it tells, and which versions its tokens had."""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError
from tests.engines.fakes import Fake, call, chunk

from bridle.engines.pool_replica import Replica, ReplicaState, RoutedCall, RoutingSettings
from bridle.engines.pool_replica import make_replica as made
from bridle.errors import EngineError
from bridle.types import FinishReason, VersionSpan

STOP = FinishReason.STOP


class Stubborn(Fake):
    """Cannot be told anything."""

    async def abort(self, request_id):
        raise RuntimeError(request_id)

    async def pause(self, mode):
        return mode == "keep"

    async def resume(self):
        raise EngineError("no")


def test_versions_are_those_of_the_moment_each_piece_came():
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    for version, ids in ((1, [5, 5]), (1, [5]), (2, []), (3, [5])):
        replica.version = version
        routed.took(chunk(ids), replica)
    last = routed.took(chunk([], STOP), replica)
    # The last piece began under 2.
    assert last.versions == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 4))
    assert routed.cut().versions == last.versions
    assert last.mixed_versions
    assert routed.cut().mixed_versions


def test_only_the_first_message_of_a_joined_chunk_has_the_version_before():
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    replica.version = 1
    routed.took(chunk([5]), replica)
    replica.version = 2
    routed.took(replace(chunk([5, 6, 7]), first=1), replica)
    assert routed.spans == [VersionSpan(1, 0, 2), VersionSpan(2, 2, 4)]
    assert routed.mixed


@pytest.mark.parametrize("pieces", [[[5, 5]], [[5], [5]]], ids=["whole", "streamed"])
def test_a_reply_over_a_change_of_weights_keeps_its_first_version_whatever_the_engine_says(pieces):
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    replica.version = 7
    replica.begin(routed)
    for ids in pieces[:-1]:
        routed.took(chunk(ids), replica)
    replica.version = 8
    told = (VersionSpan(8, 0, 2),)
    last = routed.took(chunk(pieces[-1], STOP, versions=told), replica)
    assert last.versions == (VersionSpan(7, 0, 2),)
    assert last.mixed_versions


def test_versions_that_the_engine_tells_are_believed_and_learned():
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    told = (VersionSpan(8, 0, 1),)
    assert routed.took(chunk([5], STOP, versions=told), replica).versions == told
    assert replica.version == 8


def test_a_reply_without_a_token_has_no_versions():
    assert RoutedCall(call()).took(chunk([], STOP), Replica("a", Fake())).versions == ()


def test_prompt_tokens_and_those_from_the_cache_are_counted_once_a_call():
    replica, routed = Replica("a", Fake()), RoutedCall(call())
    routed.took(chunk([1], cached_tokens=2), replica)
    routed.took(chunk([1], STOP, cached_tokens=2), replica)
    told = replica.status(0)
    assert (told["prompt_tokens"], told["cached_tokens"]) == (3, 2)


def test_a_replica_s_name_has_no_password():
    assert made("sglang:http://u:secret@a:1/v1", lambda _: Fake()).name == "sglang:http://a:1/v1"


async def test_a_replica_that_cannot_end_a_call_is_no_failure_of_ours():
    replica = Replica("a", Stubborn())
    replica.begin(RoutedCall(call()))
    await replica.abort_all()
    assert replica.load == 1


async def test_holding_and_going_on_use_the_engine_s_own_way_where_it_has_one():
    replica = Replica("a", Stubborn())
    await replica.hold("keep")
    error = await replica.release()
    assert str(error) == "no"
    assert await Replica("b", Fake()).release() is None


def test_a_replica_knows_since_when_it_is_what_it_is():
    replica = Replica("a", Fake())
    replica.enter(ReplicaState.LIVE)
    since = replica.since
    replica.enter(ReplicaState.LIVE)
    assert replica.since == since
    assert replica.status(4)["sessions"] == 4


@pytest.mark.parametrize(
    ("spec", "again"), [("http://a", True), ("sglang:http://a", True), ("scripted:x", False)]
)
def test_only_servers_are_opened_anew(spec, again):
    replica = made(spec, lambda _: Fake())
    assert replica.name == spec
    assert (replica.reopen is not None) == again
    if replica.reopen is not None:
        assert replica.reopen() is not replica.engine


@pytest.mark.parametrize("bad", [{"load_factor": 0.5}, {"attempts": 0}, {"stick": True}])
def test_settings_that_mean_nothing_are_refused(bad):
    with pytest.raises(ValidationError):
        RoutingSettings(**bad)


def test_a_cut_call_has_no_ids_of_its_own():
    assert not len(RoutedCall(call()).cut().output_ids)
    assert RoutedCall(call()).cut().output_ids.dtype == np.int32
