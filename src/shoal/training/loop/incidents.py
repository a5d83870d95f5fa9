"""Incidents that only one rank notices. All ranks learn of them before the next step, and rank 0 records them."""

from __future__ import annotations

from typing import Any

from shoal.checkpoint.run_state import RunState
from shoal.data.loader import Loader
from shoal.distributed.mesh import Mesh
from shoal.training.observe.step_records import Surroundings

# Bit of the ranks' requests for `settle`, next to the bits of callbacks.
NOTICED = 1 << 20


class RankIncidents:
    """Incidents of this rank's loader."""

    def __init__(self, mesh: Mesh, loader: Loader, around: Surroundings) -> None:
        self._mesh, self._loader, self._around = mesh, loader, around

    def settle(self, state: RunState) -> None:
        """Share incidents with all ranks, which then skip samples that any rank could not read. `state` stores these.

        Raises: DataError, on every rank, if there are more bad samples than allowed.
        Collective: all ranks, a JSON gather.
        """
        own = [vars(incident) for incident in self._loader.incidents]
        self._loader.incidents.clear()
        for rank, row in enumerate(self._mesh.gather_json({"host": self._mesh.host, "incidents": own})):
            for incident in row["incidents"]:
                host = row["host"]
                bad = {int(i): said for i, said in incident.pop("bad").items()}  # JSON keys are strings
                kind = "samples" if bad else "workers"
                state.bad_samples |= bad
                self._around.note(f"rank {rank} on {host}: {incident['what']}; {incident['done']}")
                about: dict[str, Any] = {
                    "step": state.step,
                    "rank": rank,
                    "host": host,
                    "noticed": "reading",
                    **incident,
                }
                about |= {"samples": sorted(bad)} if bad else {}
                self._around.events.add(kind, **{name: value for name, value in about.items() if value is not None})
        self._loader.leave_out(state.bad_samples)
