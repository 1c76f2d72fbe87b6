"""Makes what must travel with the checkout to a GPU without a network: `scripts/gpu_pack DIR`.

    wheels/               packages that the reference image lacks
    triton_cache.tar.xz   the kernels of every part of the kit, compiled here
    manifest.json         the software that they are compiled by, and how many there are

Prints the sizes and the command to run there. Needs the software of the reference image without its
GPU, which scripts/gpu_pack installs. DIR is best .gpu_pack: there the kit finds it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_kit.compiled.carried_cache import ARCHIVE, MANIFEST
from benchmarks.gpu_kit.part_process import ROOT
from benchmarks.gpu_kit.parts import NAMES, Part, parts_named
from benchmarks.gpu_pack import wheels
from benchmarks.gpu_pack.kernels import add_kernels
from benchmarks.gpu_pack.sizes import TooLarge, check, checkout_bytes, folder_bytes

PACK = ".gpu_pack"  # folder in the packed checkout
PACKAGES = "/tmp/hearth-packages"  # folder on the machine with the GPU
COMMAND = (
    f"python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade"
    f" --target {PACKAGES} {PACK}/wheels/*.whl"
    f" && PYTHONPATH={PACKAGES} scripts/gpu_kit OUT --call a --pack {PACK}"
)


def main(argv: Sequence[str]) -> int:
    given = arguments(argv)
    try:
        failed = make(parts_named(tuple(given.only) or NAMES), given.folder)
        check(sizes_of(given.folder))
    except subprocess.CalledProcessError as error:
        return _fail(f"{' '.join(map(str, error.cmd))} ended with status {error.returncode}")
    except TooLarge as error:
        return _fail(str(error))
    print(instructions(given.folder))
    return _fail(f"not all kernels are packed of {', '.join(failed)}") if failed else 0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_pack", description="Makes what must travel with the checkout to a GPU."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help=f"folder to fill, best {PACK}")
    only = f"parts of the kit whose kernels are compiled (default: all of {', '.join(NAMES)})"
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[], metavar="PART", help=only)
    given = parser.parse_args(argv)
    given.folder = given.folder.absolute()
    return given


def make(parts: Sequence[Part], folder: Path) -> list[str]:
    """Returns the parts whose kernels cannot all be compiled. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels.download(folder / "wheels")
    with tempfile.TemporaryDirectory() as packages:
        wheels.install(folder / "wheels", Path(packages))
        paths = [packages, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        return add_kernels(parts, folder)


def sizes_of(folder: Path, root: Path = ROOT) -> dict[str, int]:
    """Returns the bytes of what travels, by kind."""
    packages = folder_bytes(folder / "wheels")
    kernels = sum((folder / name).stat().st_size for name in (ARCHIVE, MANIFEST))
    others = folder_bytes(folder) - packages - kernels
    own = {"checkout": checkout_bytes(root), "wheels": packages, "kernels": kernels}
    return own | ({"others": others} if others else {})


def instructions(folder: Path) -> str:
    is_in_place = folder == ROOT / PACK
    place = f"{PACK} is ignored by git and must be named where the checkout is copied."
    other = f"Copy {folder} to {PACK} in the checkout. "
    return f"{'' if is_in_place else other}{place}\nThe command there:\n\n{COMMAND}"


def _fail(reason: str) -> int:
    print(f"gpu_pack: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
