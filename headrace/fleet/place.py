"""Where a replica runs: of which model, in which slot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.core.deployment import ModelDeployment, ReplicaDeployment
from headrace.core.routing import Role


@dataclass(frozen=True)
class LocalModel:
    """A model whose replicas run here; ``folder`` and ``revision`` are what its name resolved to."""

    deployment: ModelDeployment
    folder: Path
    revision: str

    @property
    def name(self) -> str:
        return self.deployment.name


@dataclass(frozen=True)
class Place:
    """The first process in a slot is named after it, later ones add a number."""

    model: LocalModel
    plan: ReplicaDeployment
    generation: int = 0

    @property
    def slot(self) -> str:
        return self.plan.id

    @property
    def role(self) -> Role:
        return self.plan.role

    @property
    def replica_id(self) -> str:
        return f"{self.slot}.{self.generation}" if self.generation else self.slot
