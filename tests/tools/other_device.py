"""A fake device: what a GPU would refuse or wait for shows up on a CPU.

Tensors on ``OTHER`` are fake (a shape, no memory); tensors of the CPU are real. Operations that mix
the two raise as they would with a GPU, and every moment at which the CPU would have to wait for the
device (``.item()``, ``.cpu()``) is counted and answered with ones; a data-dependent shape raises.
Copies to the device that wait (without ``non_blocking``) are counted too, as ``upload``, and so are
numbers that are assigned to an element there: torch copies each to a GPU by itself.

Run as a script, in a process of its own because the device stays registered for good: trains,
evaluates and samples on ``OTHER`` from the zoo in the working directory and prints, as JSON, how
often each kind of work waits, or what went wrong.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)


class _Backend(_DummyBackendModule):
    """What torch asks a device's module for; a fake tensor has no values to seed."""

    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    manual_seed_all = staticmethod(lambda seed: None)


_setup_privateuseone_for_python_backend("other", backend_module=_Backend())
OTHER = torch.device("other:0")
aten = torch.ops.aten


class OtherDevice(TorchDispatchMode):
    """Inside it ``OTHER`` can be used; ``waits`` counts synchronizations by operation."""

    has_no_float64 = False
    """As a Mac's GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        is_there = any(_is_other(tensor.device) for tensor in tensors)
        device = kwargs.get("device")
        goes_there = device is not None and _is_other(torch.device(device))
        if not is_there and not goes_there:
            return func(*args, **kwargs)
        self._count_upload(func, args, kwargs, is_there)
        if func is aten._local_scalar_dense.default:
            self.waits["item"] += 1
            return torch.ones((), dtype=args[0].dtype).item()
        if is_there and device is not None and not goes_there:
            self.waits["cpu"] += 1
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and not _is_other(args[0].device):
            self.waits["cpu"] += 1
            return args[0].fill_(1)
        with self.fake:
            args, kwargs = tree_map(self._to_fake, (args, kwargs))
            found = func(*args, **kwargs)
        made = [x for x in tree_flatten(found)[0] if isinstance(x, torch.Tensor)]
        if self.has_no_float64 and any(x.dtype == torch.float64 for x in made):
            raise TypeError(f"{func}: float64 on a device that has none")
        return found

    def _count_upload(self, func: Any, args: Any, kwargs: Any, is_there: bool) -> None:
        if func is aten._to_copy.default and not is_there:
            self.waits["upload"] += not kwargs.get("non_blocking")
        if func is aten.copy_.default and _is_other(args[0].device) > _is_other(args[1].device):
            self.waits["upload"] += not (args[2:] and args[2])

    def __enter__(self) -> OtherDevice:
        self.assignments = _Assignments(self.waits)
        self.assignments.__enter__()
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.assignments.__exit__(*error)

    def _to_fake(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self.fake.from_tensor(value)
        return value


class _Assignments(TorchFunctionMode):
    """Counts ``tensor[...] = number``."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            self.waits["upload"] += _is_other(args[0].device)
        return func(*args, **(kwargs or {}))


def _is_other(device: torch.device) -> bool:
    return device.type == OTHER.type


TINY = {
    "model.num_layers": 1, "model.width": 8, "model.num_heads": 2,
    "data.train": "text.txt", "data.cache": "cache", "data.block_length": 16,
    "train.batch_size": 4, "log.every": 1000, "checkpoint.every": "never",
}  # fmt: skip
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bell": ("tiny_bell", TINY),
    "base": ("tiny_base", TINY),
    "muon": ("tiny", TINY | {"optimizer": "muon"}),
    "accumulated": ("tiny", TINY | {"train.microbatch_size": 2}),
    "recomputed": ("tiny", TINY | {"scale.recompute": "block", "model.dropout": 0.1}),
    "time_input": ("tiny", TINY | {"model.modulation": "time"}),
    "documents": ("tiny", TINY | {"data.documents": "line", "data.document_attention": True}),
    "arm": ("tiny_arm", TINY),
    "sigma_arm": ("tiny_sigma_arm", TINY),
    "aoarm": ("tiny_aoarm", TINY),
    "cpt": ("cpt_tiny", {k: v for k, v in TINY.items() if "model." not in k}),
}
RUNS = ("bell", "arm", "aoarm", "cpt", "gpt2")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "ancestral": {"top_p": 0.9, "temperature": 0.7},
    "most_confident": {"rule": "most_confident"},
    "remask": {"remask": 0.2, "top_k": 5},
    "cache": {"block_length": 8, "cache": "prefix"},
}


def _per_unit(mode: OtherDevice, work: Callable[[int], object], few: int) -> Any:
    """Waits per step (batch, ...): of twice as many less those of few, so without set-up."""
    found = []
    for number in (few, 2 * few):
        mode.waits.clear()
        work(number)
        found.append(mode.waits.copy())
    counts = {name: (count - found[0][name]) / few for name, count in found[1].items()}
    return {name: count for name, count in counts.items() if count}


def training_waits(name: str) -> Any:
    """Per optimizer step; validation is part of the training, checkpoints are not."""
    import bellmask
    from bellmask.storage import checkpoint
    from bellmask.utils import distributed

    distributed.pick_device = lambda *_: OTHER
    checkpoint.CheckpointStore.save = lambda *_, **__: None
    preset, options = TRAININGS[name]
    start = {"start.model": "gpt2", "start.anneal_steps": 9} if name == "cpt" else {}

    def train(steps: int) -> None:
        more = {"train.steps": steps, "validation.every": f"{steps} steps", "validation.blocks": 8}
        config = bellmask.preset(preset).with_options(options | start | more)
        bellmask.train_run(config, f"trained/{name}-{steps}", is_quiet=True)

    with OtherDevice() as mode:
        return _per_unit(mode, train, 1)


def run_waits(name: str) -> dict[str, Any]:
    """Per batch of an evaluation, step of samplers and text that is scored, of a stored run."""
    import bellmask
    from bellmask.evaluate import scorer

    run = bellmask.load_run(name, device="cpu")
    blocks, found = run.blocks()[1], {}
    with OtherDevice() as mode:
        run.model.to(OTHER)
        run = replace(run, device=OTHER)
        works: dict[str, tuple[Callable[[int], object], int]] = {
            f"evaluate {name}": (lambda n: run.evaluate(blocks.slice(0, 8 * n), batch_size=8), 1)
        }
        if name == "cpt":  # its causal LM as a scorer of texts: one wait per text
            losses = functools.partial(scorer._causal_lm_losses, run.model.language_model)
            works["score"] = (lambda n: losses([scorer.Request((1,), (2, 3))] * n), 1)
        if run.framework.is_causal:
            works[f"sample {name}"] = (lambda n: run.sample(2, length=n), 4)
        else:
            for kind, settings in SAMPLINGS.items():
                if kind != "cache" or name == "bell":  # a causal LM caches nothing
                    sample = functools.partial(run.sample, 8, length=16, **settings)
                    works[f"sample {name} {kind}"] = (lambda n, sample=sample: sample(steps=n), 2)
        for what, (work, few) in works.items():
            found[what] = _per_unit(mode, work, few)
        return found


def mixing() -> str:
    """What adding tensors of two devices gives."""
    with OtherDevice():
        try:
            torch.ones(2) + torch.ones(2).to(OTHER)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def without_float64() -> str:
    """What evaluating and sampling say of a device that has none, after a tensor that should."""
    from bellmask.generate import sampler

    OtherDevice.has_no_float64 = True
    sampler.float64_device = lambda device: torch.device("cpu")
    run_waits("bell")
    with OtherDevice():
        try:
            torch.ones(2, dtype=torch.float64).to(OTHER)
        except TypeError as error:
            return str(error)
    return "nothing"


def main() -> None:
    """Everything, or the runs and trainings that are named; one JSON object."""
    found: dict[str, Any] = {"mixing": mixing()}
    if sys.argv[1:] == ["without_float64"]:
        found = {"float64": without_float64()}
    for name in sys.argv[1:] or dict.fromkeys([*RUNS, *TRAININGS]):
        if name in RUNS:
            found |= run_waits(name)
        if name in TRAININGS:
            found[f"train {name}"] = training_waits(name)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
