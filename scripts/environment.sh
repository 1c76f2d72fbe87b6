# Sourced by the other scripts: creates .venv and installs missing packages.
# shellcheck shell=bash

ROOT="$(CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
OLDEST="$VENV/oldest" # packages that replace newer ones if PYTHONPATH contains this folder
CLIENTS="$ROOT/.venv-clients" # an environment for each tests/clients/*/NAME.txt
REFERENCE="${HEARTH_REFERENCE:-$ROOT/.venv-gpu}" # the software of machines with a GPU, without CUDA
CPU_INDEX="https://download.pytorch.org/whl/cpu"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Most modules are never imported: pip would compile all of them, 22 s on one core.
INSTALL=(install --no-compile)

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

# Prints the comment at the head of the script.
print_usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

# Holds the lock of the environment $1 until this shell ends, without which two scripts would install
# into it at once: where there is flock (not on macOS), and the lock's file may be written.
lock() {
  command -v flock >/dev/null || return 0
  { exec 9>"$1.lock"; } 2>/dev/null || return 0
  flock -n 9 && return
  echo "Waiting for another script, which installs into $1"
  flock 9
}

# Prints the Python that is named, or the first one on the PATH that is new enough.
find_python() {
  local name names=(python3 python3.13 python3.12 python3.11)
  [[ -z "${HEARTH_PYTHON:-}" ]] || names=("$HEARTH_PYTHON")
  for name in "${names[@]}"; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  [[ -z "${HEARTH_PYTHON:-}" ]] || fail "HEARTH_PYTHON=$HEARTH_PYTHON is no Python 3.11 or newer"
  fail "Python 3.11 or newer is needed and was not found (apt install python3, or set HEARTH_PYTHON)"
}

# Whether the programs of the environment $1 find their Python, and it their packages: not once the
# folder has been moved, or the Python has been removed or has become a newer one.
has_python() {
  local first second
  { read -r first && read -r second; } <"$1/bin/pip" || return
  if [[ "$first" == "#!/bin/sh" ]]; then # of a path that is long, or has a space
    first="${second#*\"}"
    first="${first%%\"*}"
  fi
  "${first#\#!}" -c 'import pip' 2>/dev/null
}

# Makes the environment $1, unless it is there already, with the Python $2 or one that is found.
make_venv() {
  local venv="$1" python="${2:-}" clear=""
  if [[ -x "$venv/bin/pip" ]]; then
    has_python "$venv" && return
    clear=1
  fi
  [[ -n "$python" ]] || python="$(find_python)"
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module: apt install python3-venv"
  echo "Making $venv with $("$python" --version)"
  "$python" -m venv ${clear:+--clear} "$venv"
}

has_nvidia_driver() {
  [[ -e /proc/driver/nvidia/version ]] || command -v nvidia-smi >/dev/null
}

wants_cpu_torch() {
  [[ "$(uname -s)" == Linux ]] && ! has_nvidia_driver
}

# The CPU build has the local version +cpu. Sources: $HEARTH_TORCH_INDEX if set, else the sources
# configured in pip (a mirror, a folder of wheels), else PyTorch's index.
install_cpu_torch() {
  local torch
  torch="$(grep -o '^torch==[0-9.]*' "$ROOT/scripts/constraints-cpu.txt")+cpu"
  if [[ -n "${HEARTH_TORCH_INDEX:-}" ]]; then
    "$VENV/bin/pip" "${INSTALL[@]}" --extra-index-url "$HEARTH_TORCH_INDEX" "$torch"
    return
  fi
  echo "Installing $torch"
  "$VENV/bin/pip" "${INSTALL[@]}" --no-deps "$torch" 2>/dev/null ||
    "$VENV/bin/pip" "${INSTALL[@]}" --extra-index-url "$CPU_INDEX" "$torch" ||
    fail "cannot install $torch: set HEARTH_TORCH_INDEX to an index that has it"
}

# Installs the project with the extra named by $1, unless its requirements are installed already.
install_project() (
  lock "$VENV"
  local extra="$1" digest stamp constraints=()
  make_venv "$VENV"
  wants_cpu_torch && constraints=(-c "$ROOT/scripts/constraints-cpu.txt")
  digest="$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints-cpu.txt" <(echo "${constraints[@]:-}") |
    cksum | tr -d ' ')"
  stamp="$VENV/.installed-$extra"
  [[ -f "$stamp" && "$(<"$stamp")" == "$digest" ]] && return
  wants_cpu_torch && install_cpu_torch
  echo "Installing Hearth and its dependencies"
  "$VENV/bin/pip" "${INSTALL[@]}" "${constraints[@]}" -e "${ROOT}[$extra]"
  echo "$digest" >"$stamp"
)

# Triton 3.6 interprets loops over tensors only with a numpy before 2.4.
# Steps of the long run go on after a failure, so here only && ends one.
install_oldest_triton() (
  lock "$OLDEST"
  local packages=("triton==3.6.0" "numpy==2.3.*")
  [[ -f "$OLDEST/.installed" && "$(<"$OLDEST/.installed")" == "${packages[*]}" ]] && return
  mkdir -p "$OLDEST" &&
    "$VENV/bin/pip" install --quiet --no-deps --upgrade --target "$OLDEST" "${packages[@]}" &&
    echo "${packages[*]}" >"$OLDEST/.installed"
)

# Prints a Python 3.12, the reference image's.
find_python312() {
  local python
  for python in "${HEARTH_PYTHON312:-python3.12}" "${HOME:-}"/.pyenv/versions/3.12.*/bin/python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  fail "Python 3.12 is needed, as on machines with a GPU, and was not found (set HEARTH_PYTHON312)"
}

# Installs what the reference image has and the GPU kit imports, with torch's CPU build where it can
# be had: compiling needs no more.
make_reference_environment() (
  local list="$ROOT/benchmarks/gpu_pack/environment.txt" stamp="$REFERENCE/.installed" python torch
  [[ -n "${HEARTH_REFERENCE:-}" ]] && return
  lock "$REFERENCE"
  [[ -f "$stamp" && "$(<"$stamp")" == "$(<"$list")" ]] && return
  python="$(find_python312)"
  make_venv "$REFERENCE" "$python"
  torch="$(grep '^torch==' "$list")+cpu"
  echo "Installing the software of the reference image"
  "$REFERENCE/bin/pip" install --quiet --no-deps "$torch" 2>/dev/null ||
    "$REFERENCE/bin/pip" install --quiet --no-deps --index-url "$CPU_INDEX" "$torch" 2>/dev/null ||
    echo "No $torch: its CUDA build is installed"
  "$REFERENCE/bin/pip" install --quiet -r "$list"
  cp "$list" "$stamp"
)

# Installs the distribution's Chromium for the tests of the gateway's page, where that is allowed:
# tests without one are skipped, and say so.
install_chromium() {
  [[ -n "${HEARTH_CHROMIUM:-}" ]] && return
  command -v chromium >/dev/null && return
  if [[ "$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "No chromium, and no right to install it: the browser's tests are skipped"
    return
  fi
  echo "Installing chromium"
  { apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 ||
    echo "chromium could not be installed: the browser's tests are skipped"
}

# Installs the outside clients of the requirements file $1 in an environment named like the file.
install_clients() (
  local requirements="$1" venv digest stamp
  venv="$CLIENTS/$(basename "$requirements" .txt)"
  mkdir -p "$CLIENTS"
  lock "$venv"
  digest="$(cat "$requirements" "$ROOT/tests/clients/pytest.txt" | cksum | tr -d ' ')"
  stamp="$venv/.installed"
  make_venv "$venv"
  [[ -f "$stamp" && "$(<"$stamp")" == "$digest" ]] && return
  echo "Installing ${requirements#"$ROOT/"}"
  "$venv/bin/pip" "${INSTALL[@]}" --quiet -r "$requirements"
  echo "$digest" >"$stamp"
)

# The wheel beside Hearth's own packages, whose torch it takes: handoffs over it are in tests/nixl.
# A step of the long run, as install_oldest_triton.
install_nixl() (
  local folder="$CLIENTS/nixl" digest
  mkdir -p "$CLIENTS" && lock "$folder"
  digest="$(cksum <"$ROOT/tests/nixl/nixl.txt")"
  [[ -f "$folder/.installed" && "$(<"$folder/.installed")" == "$digest" ]] && return
  echo "Installing tests/nixl/nixl.txt"
  rm -rf "$folder" &&
    "$VENV/bin/pip" install --quiet --no-deps --target "$folder" -r "$ROOT/tests/nixl/nixl.txt" &&
    echo "$digest" >"$folder/.installed"
)

# promtool checks boards and alert rules in tests/deploy, which skip without it.
install_promtool() {
  command -v "${HEARTH_PROMTOOL:-promtool}" >/dev/null && return
  if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    echo "No promtool: its tests are skipped (apt-get install prometheus, or set HEARTH_PROMTOOL)"
    return
  fi
  echo "Installing promtool"
  apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus >/dev/null ||
    echo "No promtool: apt-get cannot install prometheus; its tests are skipped"
}
