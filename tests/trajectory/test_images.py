"""The files of a trace's images, out of its messages."""

import dataclasses

import pytest

from bridle.errors import TrainingError
from bridle.testing import trainer_sessions
from bridle.trajectory.sample import images_of, refuse_images

SEEN = next(one for group in trainer_sessions() for one in group.sessions if one.traces[0].media)


def test_image_files_of_a_trace_have_the_order_of_its_placeholders():
    (trace,) = SEEN.traces
    (image,) = trace.media
    twice = dataclasses.replace(trace, media=[image, image | {"start": 2}])
    (file,) = images_of(trace)
    assert file.startswith(b"\x89PNG")
    assert images_of(twice) == [file, file]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a.png", "data:image/png;base64,????", "data:image/png;base64,AAAA"]
)
def test_an_image_whose_bytes_are_not_in_the_messages_is_an_error(url):
    (trace,) = SEEN.traces
    part = {"type": "image_url", "image_url": {"url": url}}
    other = dataclasses.replace(trace, prompt_messages=[{"role": "user", "content": [part]}])
    with pytest.raises(TrainingError, match="trace main: 1 of 1 images are not in its messages"):
        images_of(other)


def test_a_session_with_images_is_refused_for_a_trainer_without_image_support():
    with pytest.raises(TrainingError, match=r"session images has images, .* slime would not get"):
        refuse_images("slime", SEEN)
