from bridle.lifecycle.events import Events, Installing


def test_only_listeners_are_told_and_only_while_they_listen():
    events, one, two = Events(), [], []
    line = Installing("pi", "ready")
    events.tell(line)
    with events.listening(one.append):
        with events.listening(two.append):
            events.tell(line)
        events.tell(line)
    events.tell(line)
    assert (one, two) == ([line, line], [line])
