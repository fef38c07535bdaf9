import pytest

from bridle.datasets.harbor import dockerfile_steps
from bridle.errors import ConfigError


@pytest.fixture
def steps(tmp_path):
    """The steps of a Dockerfile's text, beside which lie `a.txt` and `sub/b.txt`."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "sub" / "b.txt").write_text("b")

    def read(text):
        (tmp_path / "Dockerfile").write_text(text)
        return dockerfile_steps(tmp_path / "Dockerfile")

    return read


def test_portable_dockerfile_instructions_become_prepare_steps_in_order(steps, tmp_path):
    made = steps(
        "FROM debian:12\n# a comment\nWORKDIR /app\nENV A=1 B='two words'\nENV C three\n"
        "COPY a.txt .\nCOPY sub /app/deep\ncopy a.txt renamed\nCOPY a.txt sub/b.txt both/\n"
        "RUN echo one && \\\n    # inside\n    echo two\nCMD bash\n"
    )
    assert made.workdir == "/app"
    assert made.env == {"A": "1", "B": "two words", "C": "three"}
    assert [(step["type"], step.get("target") or step["command"]) for step in made.prepare] == [
        ("upload_file", "a.txt"),
        ("upload_dir", "deep"),
        ("upload_file", "renamed"),
        ("upload_file", "both/a.txt"),
        ("upload_file", "both/b.txt"),
        ("exec", "echo one &&     echo two"),
    ]
    assert made.prepare[0]["source"] == str(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("WORKDIR app", "Dockerfile:1: WORKDIR: the folder must be absolute"),
        ("WORKDIR /a\n\nWORKDIR /b", "Dockerfile:3: WORKDIR: the folder must be absolute"),
        ("USER nobody", "USER: this instruction needs an image"),
        ("COPY a.txt .", "the target must lie in the WORKDIR"),
        ("WORKDIR /a\nCOPY a.txt /etc/x", "the target must lie in the WORKDIR"),
        ("WORKDIR /a\nCOPY --from=x a.txt .", "only 'COPY source... target'"),
        ("WORKDIR /a\nCOPY ../x .", "no such file beside the Dockerfile"),
        ("WORKDIR /a\nCOPY gone .", "no such file beside the Dockerfile: 'gone'"),
        ("WORKDIR /a\nCOPY /etc/passwd .", "no such file beside the Dockerfile"),
        ("WORKDIR /a\nCOPY .. .", "no such file beside the Dockerfile: '..'"),
        ("ENV A=$B", "refers to another variable"),
        ("ENV PATH /opt/bin:$PATH", "refers to another variable"),
    ],
)
def test_a_dockerfile_instruction_that_needs_an_image_is_refused_with_its_line(steps, text, why):
    with pytest.raises(ConfigError, match=why):
        steps(text)
