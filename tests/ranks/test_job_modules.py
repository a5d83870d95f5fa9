"""Jobs in packages on ranks and data workers: the same modules, import path and bits on one device and on two."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launching import Run, run

JOB = """
import json, os, sys
import torch, shoal
from torch.utils.data import DataLoader, Dataset, get_worker_info
from ..nets import net
import at_the_top


class Samples(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        who = f"{os.environ.get('RANK', '0')}-{get_worker_info() is not None}"
        with open(f"{os.environ['SEEN']}/{who}", "w") as file:
            json.dump([sys.path, type(self).__module__], file)
        return torch.randn(6, generator=torch.Generator().manual_seed(i)), i % 3


def data():
    return DataLoader(Samples(), 16, num_workers=1)


def job():
    return shoal.Job(
        model=net, loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]), train_data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), global_batch=16, length=shoal.Steps(3),
    )
"""


def test_one_import_path_everywhere(tmp_path: Path) -> None:
    """As a path on one device, and as a dotted module on two."""
    project = tmp_path / "project"
    texts = {"pack/__init__.py": "", "pack/train/__init__.py": "", "pack/train/jobs.py": JOB, "at_the_top.py": "",
             "pack/nets.py": "import torch\ndef net():\n    return torch.nn.Linear(6, 3)\n"}  # fmt: skip
    for name, text in texts.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    ended, seen = [], []
    for target, devices in (("pack/train/jobs.py", 1), ("pack.train.jobs:job", 2)):
        folder = tmp_path / f"seen-{devices}"
        folder.mkdir()
        seeing = {"SEEN": str(folder)}
        out, fresh = tmp_path / f"run-{devices}", devices == 1
        wanted = Run(target, out, devices, True, environment=seeing, cwd=project, fresh=fresh)
        ended.append(run(wanted).expect(0).result["weights_sha256"])
        seen += [json.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir()]
    assert ended[0] == ended[1]
    assert len(seen) >= 3  # a worker of each rank
    assert all(one == seen[0] for one in seen)
    assert seen[0][1] == "pack.train.jobs"
    assert (seen[0][0][0], seen[0][0][-1]) == (str(project), str(project / "pack" / "train"))
    description = json.loads((tmp_path / "run-2" / "job.json").read_text(encoding="utf-8"))
    assert description["module"] == "pack.train.jobs"
    assert description["code"].keys() >= {"the job file", "pack/nets.py", "at_the_top.py"}
