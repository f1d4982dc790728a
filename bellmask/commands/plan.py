"""``bellmask plan``: what a run will need, before it is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bellmask.config.presets import resolve, take_option, wants_help
from bellmask.utils.errors import UserError

HELP = """Say what a run needs: parameters, FLOPs, memory per device, storage and time.

usage: bellmask plan PRESET --devices 4xH100 [--nodes N] [--probe] [--efficiency SHARE]
                     [--json FILE] [--config FILE] [any option of 'bellmask train']

PRESET is a name from 'bellmask presets', a run folder or a config.json. Nothing is fetched or
trained, and no GPU is needed.
  --devices WHAT      4xH100, or 16x8xH100 for 16 machines of 8. With --probe the default is this
                      machine's device. Known:
                      {known}
  --nodes N           so many machines of --devices
  --probe             time a few real microbatches on this machine's device and plan with those
  --efficiency SHARE  share of the data sheet's speeds that kernels reach from start to end; default
                      {efficiency}, which the paper's three runs lie around. Compiled and tuned runs
                      reach more
  --json FILE         also write all numbers there; "fits" of "memory" says whether it fits (the
                      exit code is 0 also where it does not)

examples:
  bellmask plan lm1b --devices 2xH200
  bellmask plan owt --devices 4xH100 --train.microbatch-size 32
  bellmask plan cpt_gpt2_large --devices 4xB200 --scale.recompute selective
  bellmask plan tiny --probe
  bellmask plan owt --devices 8x8xH100 --model.num-layers 32 --model.width 4096 \\
      --model.num-heads 32 --data.block-length 4096 --scale.sharding full --scale.recompute block
"""

OWN = ("devices", "nodes", "efficiency", "json")


def run(args: Sequence[str]) -> int:
    """Plan and print."""
    args = list(args)
    if not args or wants_help(args):
        from bellmask.plan.devices import DEVICES
        from bellmask.plan.timing import EFFICIENCY

        print(HELP.format(known=", ".join(DEVICES), efficiency=EFFICIENCY))
        return 0
    own = {name: take_option(args, f"--{name}") for name in OWN}
    is_probed = "--probe" in args
    name, config = resolve([a for a in args if a != "--probe"], "bellmask plan")
    if not own["devices"] and not is_probed:
        raise UserError("bellmask plan needs --devices, as in --devices 4xH100 (or --probe)")
    out = Path(own["json"][-1]) if own["json"] else None
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--json {out}: there is no folder {out.parent}")

    from bellmask.plan.planner import plan
    from bellmask.plan.probe import local_device
    from bellmask.plan.table import print_plan
    from bellmask.plan.timing import EFFICIENCY
    from bellmask.utils.files import write_text

    devices = own["devices"][-1] if own["devices"] else local_device(config.train.device).name
    made = plan(
        config,
        devices,
        nodes=int(_number("--nodes", own["nodes"], is_whole=True)) if own["nodes"] else None,
        efficiency=_number("--efficiency", own["efficiency"]) if own["efficiency"] else EFFICIENCY,
        is_probed=is_probed,
    )
    print_plan(made, name)
    if out is not None:
        write_text(out, json.dumps(made.to_dict(), indent=1) + "\n")
        print(f"numbers: {out}")
    return 0


def _number(option: str, values: list[str], *, is_whole: bool = False) -> float:
    try:
        return int(values[-1]) if is_whole else float(values[-1])
    except ValueError:
        kind = "a whole number" if is_whole else "a number"
        raise UserError(f"{option} {values[-1]}: must be {kind}") from None
