"""`python -m fsdp_on_cpu train ...`: the `mesotron` command where FSDP2 also shards on CPUs.

On CPUs Accelerate replaces FSDP by plain data parallelism. Here it takes its gloo processes for
GPUs' ones; everything else runs as on GPUs.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

SHIPPED = Path(__file__).parents[2] / "examples" / "scaling" / "fsdp2.yaml"


def shard_on_cpus() -> None:
    """From now on Accelerate shards in this process if its variables ask for FSDP."""
    start = PartialState.__init__

    def patched(self: PartialState, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = patched


def shipped_variables() -> dict[str, str]:
    """What `accelerate launch` would set for the shipped file."""
    words = ["--config_file", str(SHIPPED), "--main_process_port", "0"]
    args: argparse.Namespace = launch_command_parser().parse_args([*words, "mesotron"])
    found = prepare_multi_gpu_env(_validate_launch_command(args)[0])

    return {name: value for name, value in found.items() if os.environ.get(name) != value}


if __name__ == "__main__":
    from mesotron.cli import main

    shard_on_cpus()
    sys.exit(main())
