#!/usr/bin/env bash
# nixl-cu12 1.5.1 (its UCX is 1.23.0) on Debian 12 with glibc 2.36, without InfiniBand: a process that created a UCX backend
# ends with a segmentation fault, after `main` and all Python code.
#
# Seen: the process works, and `nixl_capi_destroy_agent` succeeds or is not called. During `exit`, the dynamic linker runs
# the destructors of the wheel's libnl-route, which UCX's InfiniBand module has loaded, and `rtnl_tc_unregister` crashes. The
# exit status is 139 instead of 0. All flags of `dlopen` give the same result, as do `UCX_TLS=tcp,self` and
# `UCX_TLS=shm,tcp,self`. A process without a backend ends with 0.
#
# What follows for a consumer: a supervisor takes a finished process for a crashed one. On hosts without InfiniBand,
# `UCX_MODULES=^ib` avoids loading the module and the crash. Where InfiniBand is needed, check the exit of a process that
# creates an agent, and end such a process with `_exit` if it crashes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps --only-binary :all: nixl-cu12==1.5.1 2>"$folder/log" ||
    { cat "$folder/log"; exit 1; }
cat >"$folder/agent.py" <<'PYTHON'
import ctypes
import sys
import sysconfig

library = ctypes.CDLL(sysconfig.get_path("platlib") + "/.nixl_cu12.mesonpy.libs/libnixl_capi.so")
agent, kinds, params, backend = (ctypes.c_void_p() for _ in range(4))
assert library.nixl_capi_create_agent(b"agent", ctypes.byref(agent)) == 0
if sys.argv[1] == "backend":
    assert library.nixl_capi_get_plugin_params(agent, b"UCX", ctypes.byref(kinds), ctypes.byref(params)) == 0
    assert library.nixl_capi_create_backend(agent, b"UCX", params, ctypes.byref(backend)) == 0
assert library.nixl_capi_destroy_agent(agent) == 0
PYTHON
export UCX_DEBUG_SIGNO=0 UCX_MEM_EVENTS=n NIXL_LOG_LEVEL=FATAL UCX_LOG_LEVEL=fatal
ended() {
    local status=0
    "$@" >"$folder/output" 2>&1 || status=$?
    echo "$status"
}
without=$(ended "$folder/venv/bin/python" "$folder/agent.py" none)
with=$(ended "$folder/venv/bin/python" "$folder/agent.py" backend)
modules=$(ended env "UCX_MODULES=^ib" "$folder/venv/bin/python" "$folder/agent.py" backend)
[ "$without $with $modules" = "0 139 0" ] || { echo "status $without, $with, $modules; expected 0, 139, 0"; exit 1; }
echo "as stated: status 139 with a UCX backend, and 0 without a backend or without UCX's InfiniBand modules"
