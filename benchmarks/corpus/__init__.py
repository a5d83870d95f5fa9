"""A corpus of models that others wrote, on which `shoal verify` is proven; none of them needs a download."""

import os

# Before torch is loaded: threads that wait for each other in a loop take the core of the cell that runs beside.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
