"""The fields of slime's `Sample` (slime/utils/types.py at commit 624b824), which Miles' shares."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None

    Status = Status

    def to_dict(self):
        return self.__dict__ | {"status": self.status.value}

    @staticmethod
    def from_dict(data):
        return Sample(**data | {"status": Status(data["status"])})

    def validate(self) -> None:
        """Miles' own checks."""
        assert len(self.tokens) >= self.response_length >= 0
        assert self.loss_mask is not None
        assert len(self.loss_mask) == self.response_length
        assert self.rollout_log_probs is not None
        assert len(self.rollout_log_probs) == self.response_length
        if self.rollout_routed_experts is not None:
            assert len(self.rollout_routed_experts) == len(self.tokens) - 1
