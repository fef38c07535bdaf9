"""Trackers that tests name by their dotted path."""

from typing import ClassVar

from bridle.telemetry.base import Tracker


class Recorder(Tracker):
    """Records all events; `made` are all recorders of this process."""

    made: ClassVar[list] = []

    def __init__(self, folder, config):
        self.folder, self.config = folder, config
        self.values, self.rows, self.ended, self.closed = [], [], [], False
        self.made.append(self)

    def numbers(self, axis, step, values):
        self.values.append((axis, step, dict(values)))

    def samples(self, rows):
        self.rows += rows

    def session(self, ended):
        self.ended.append(ended)

    def close(self):
        self.closed = True


class Broken(Tracker):
    def __init__(self, folder, config):
        """Nothing fails yet."""

    def numbers(self, axis, step, values):
        raise OSError("the service is down")


class Refused(Tracker):
    def __init__(self, folder, config):
        raise ValueError("no API key")
