"""Trackers of one's own, named by their dotted path."""

from typing import ClassVar

from bridle.telemetry.base import Base


class Recorder(Base):
    """Keeps what it gets; `made` are all of this process."""

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


class Broken(Base):
    def __init__(self, folder, config):
        """Nothing fails yet."""

    def numbers(self, axis, step, values):
        raise OSError("the service is down")


class Refused(Base):
    def __init__(self, folder, config):
        raise ValueError("no API key")
