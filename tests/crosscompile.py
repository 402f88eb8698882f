"""
Compiles Triton kernels for GPUs that are not here, and tells what came out: the PTX, registers, spills.

The tests run kernels in Triton's interpreter where there is no GPU, and a process that interprets cannot
compile. So the work is done by this file run as a program: compile_many() starts it once for a list of jobs,
which travel as JSON. A job names a function that launches the kernel: its arguments, such as NamedTuples, are
no JSON.
"""
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
# other versions to try, each a folder that `pip install --no-deps --target FOLDER triton==VERSION` has made
TRITONS = ["", *filter(None, os.environ.get("TRITONS", "").split(os.pathsep))]


@dataclass
class Job:
    """
    kernel  "module:name" of a @triton.jit function
    arch    90 for sm_90a, 100, 103, 120, 80 ...
    launch  "module:function" that launches the kernel once or more, with tensors of the CPU; the last launch
            is caught and compiled
    """
    kernel: str
    arch: int
    launch: str


@dataclass
class Compiled:
    """
    registers  of a thread
    spills     bytes of stack of a thread, which is where values go that find no register
    shared     bytes of shared memory of a program
    mma        the matrix instructions in the PTX
    sass       how many there are of each instruction of the machine code: BAR waits for the other warps, SHFL
               moves a value to another thread
    """
    ptx: str
    sass: dict[str, int]
    registers: int
    spills: int
    shared: int

    @property
    def mma(self) -> set[str]:
        return set(re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.[\w:.]+", self.ptx))


def compile_many(jobs: list[Job], triton: str = "") -> list[Compiled]:
    """ By the Triton of a folder, such as pip install --target makes, or by the one that is installed. """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([*[triton] * bool(triton), str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, __file__], input=json.dumps([asdict(job) for job in jobs]),
                          env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**result) for result in json.loads(done.stdout)]


def named(name: str):
    """ "module:attribute" -> it. """
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def caught(kernel, launch, target) -> tuple[dict, dict, dict, dict]:
    """ Signature, constexprs, attributes and options, as Triton makes them for the last launch. """
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature
    calls = []
    kernel.run = lambda *args, grid, warmup, **kwargs: calls.append((args, kwargs))
    launch()
    args, kwargs = calls[-1]
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return signature, constexprs, attrs, options.__dict__


def compile_here(job: Job) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, target = named(job.kernel), GPUTarget("cuda", job.arch, 32)
    # kernels ask what GPU they are compiled for, and Triton looks for the one of this machine
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    signature, constexprs, attrs, options = caught(kernel, named(job.launch), target)
    source = ASTSource(fn=kernel, signature=signature, attrs=attrs, constexprs=constexprs)
    compiled = triton.compile(source, target=target, options=options)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.knobs.nvidia.cuobjdump.path)
        # Triton 3.6 brings a disassembler that does not know sm_103
        report, code = (subprocess.run([*tool, path], capture_output=True, text=True).stdout
                        for tool in ([tool, "-res-usage"], [tool.with_name("nvdisasm"), "-c"]))
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", code)
    return Compiled(compiled.asm["ptx"], dict(Counter(names)), int(registers), int(stack),
                    compiled.metadata.shared)


if __name__ == "__main__":
    print(json.dumps([asdict(compile_here(Job(**job))) for job in json.load(sys.stdin)]))
