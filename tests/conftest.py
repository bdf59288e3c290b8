"""Settings that every test shares; fixtures live beside the tests that use them."""

import os
import tempfile

# Before anything imports torch: xdist's workers share the cores, so each gets one thread. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests read nothing from the network; a library that tries should say so at once rather than wait.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What `bessemer bench` measured on this machine must not change what is tested.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="bessemer-cache-")

from hypothesis import HealthCheck, settings

# No deadline: a shared machine's pauses are not a property of the code.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
