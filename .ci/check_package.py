"""Check a wheel, the source distribution beside it, and the package installed from the wheel.

Run with the interpreter of the environment where the wheel is installed::

    python .ci/check_package.py FOLDER_OF_BOTH
"""

import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import minloader

ROOT = Path(__file__).parents[1]


def files_below(*folders: str) -> set[str]:
    """Return the paths of all files below folders of this tree, relative to it."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if path.parent.name != "__pycache__"}


def require(condition: bool, complaint: str) -> None:
    """End with a message unless the condition holds."""
    if not condition:
        sys.exit(f"check_package: {complaint}")


(wheel,) = Path(sys.argv[1]).glob("*.whl")
(sdist,) = Path(sys.argv[1]).glob("*.tar.gz")
package = files_below("minloader")

with zipfile.ZipFile(wheel) as archive:
    in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
require(in_wheel == package, f"other files in wheel and tree: {sorted(in_wheel ^ package)}")
require("minloader/py.typed" in in_wheel, "no py.typed, so that type checkers skip the package")

with tarfile.open(sdist) as tar:  # the first part of a path is the distribution's name
    in_sdist = {name.partition("/")[2] for name in tar.getnames()}
needed = package | files_below("tests", "docs", "examples", ".ci")
needed |= {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}
require(needed <= in_sdist, f"not in the source distribution: {sorted(needed - in_sdist)}")

installed = Path(minloader.__file__)
require(installed.is_relative_to(sys.prefix), f"imported from {installed}, not as installed")
require(version("minloader") == minloader.__version__, "another version in the metadata")
print(f"{wheel.name}: {len(in_wheel)} files; {sdist.name}: {len(in_sdist)} files")
