"""torch's compiler is not loaded by an optimizer, and still there for those who compile: in fresh interpreters."""

import subprocess
import sys
import textwrap

import pytest

# A fresh process, since this one may have loaded the compiler already.
PRELUDE = """
    import sys, torch
    from shoal.checkpoint.whole_optimizer import compiler_deferred
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
"""


def python(code: str) -> str:
    text = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_torchs_own_optimizers_step_without_the_compiler_which_still_imports_afterwards() -> None:
    code = """
        from shoal.checkpoint.whole_optimizer import step_optimizer
        class Own(torch.optim.SGD):
            def step(self):
                self.stood_in = "torch._dynamo" in sys.modules
        with compiler_deferred():
            plain, own = torch.optim.SGD([weight], lr=0.5), Own([weight], lr=0.5)
        step_optimizer(plain)
        print(weight.tolist(), "torch._dynamo" in sys.modules)
        step_optimizer(own)
        print(own.stood_in)
        with compiler_deferred():
            plain.zero_grad()
        print("torch._dynamo" in sys.modules, "_dynamo" in vars(torch))
        with compiler_deferred():  # a real use inside loads the real one
            import torch._dynamo
            known = torch._dynamo.config is not None
            real = sys.modules["torch._dynamo"]
        print(known, hasattr(real, "optimize"), sys.modules["torch._dynamo"] is real)
        print(callable(torch.compile(lambda x: x, backend="eager")))
    """
    said = ["[0.5, 0.5, 0.5] False", "False", "False False", "True True True", "True"]
    assert python(code).splitlines() == said


@pytest.mark.slow
def test_an_outline_is_made_without_it_and_imports_what_the_constructor_asks_for() -> None:
    code = """
        from functools import partial
        from shoal.training.setup.job_model import outline
        import shoal
        others = dict(loss=print, optimizer=print, train_data=[1], global_batch=4)
        drawn = shoal.Job(model=partial(torch.nn.Embedding, 16, 8), **others)
        print(outline(drawn).weight.device.type, "torch._dynamo" in sys.modules)
        def model():
            import torch.distributed.tensor, torch._dynamo.variables  # as Transformers does with a model's first use
            return torch.nn.Embedding(16, 8)
        print(outline(shoal.Job(model=model, **others)).weight.device.type)
    """
    assert python(code).splitlines() == ["meta False", "meta"]


def test_exact_mode_is_deterministic_without_the_compiler_and_with_it() -> None:
    code = """
        from shoal.distributed.process_setup import prepare_process
        prepare_process(True, None)
        print(torch.are_deterministic_algorithms_enabled(), "torch._inductor.config" in sys.modules)
        import torch._inductor.config
        print(torch._inductor.config.deterministic)
        torch._inductor.config.deterministic = False
        prepare_process(True, None)
        print(torch._inductor.config.deterministic)
    """
    assert python(code).splitlines() == ["True False", "True", "True"]
