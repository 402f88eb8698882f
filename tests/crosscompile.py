"""
Compiles Triton kernels for GPUs that are not here, and tells what came out: the PTX, registers, spills.

The tests run kernels in Triton's interpreter where there is no GPU, and a process that interprets cannot
compile. So the work is done by this file run as a program: compile_many() starts it once for a list of jobs,
which travel as JSON, and compile_for() is a list of one.
"""
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Job:
    """
    kernel      "module:name" of a @triton.jit function
    signature   argument -> type: "*u8", "*bf16", "*fp32", "i32", "fp32" ...
    constexprs  argument -> value; also None for an absent pointer, 1 for an int that Triton specialises
    arch        90 for sm_90a, 100, 103, 120, 80 ...
    options     num_warps, num_stages
    aligned     pointers and ints are multiples of 16, which Triton finds out by itself when it launches
    """
    kernel: str
    signature: dict
    constexprs: dict
    arch: int
    options: dict = field(default_factory=dict)
    aligned: bool = True


@dataclass
class Compiled:
    """
    registers  of a thread
    spills     bytes of stack of a thread, which is where values go that find no register
    shared     bytes of shared memory of a program
    mma        the matrix instructions in the PTX
    ttgir      what Triton hands to LLVM: here operands have got their places
    """
    ptx: str
    ttgir: str
    registers: int
    spills: int
    shared: int

    @property
    def mma(self) -> set[str]:
        return set(re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.[\w:.]+", self.ptx))


def compile_for(kernel: str, signature: dict, constexprs: dict, arch: int, **options) -> Compiled:
    return compile_many([Job(kernel, signature, constexprs, arch, options)])[0]


def compile_many(jobs: list[Job]) -> list[Compiled]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, __file__], input=json.dumps([asdict(job) for job in jobs]),
                          env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**result) for result in json.loads(done.stdout)]


def compile_here(job: Job) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = job.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    index = {argument: i for i, argument in enumerate(kernel.arg_names)}
    missing = index.keys() - job.signature.keys() - job.constexprs.keys()
    assert not missing, f"{name}: neither a type nor a value for {sorted(missing)}"
    signature = {a: "constexpr" if a in job.constexprs else job.signature[a] for a in kernel.arg_names}
    attrs = {(index[a],): [["tt.divisibility", 16]] for a, kind in signature.items()
             if job.aligned and (kind.startswith("*") or kind.startswith("i"))}
    source = ASTSource(fn=kernel, signature=signature, attrs=attrs,
                       constexprs={(index[a],): value for a, value in job.constexprs.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", job.arch, 32), options=job.options)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        report = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)],
                                capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return Compiled(compiled.asm["ptx"], compiled.asm["ttgir"], int(registers), int(stack),
                    compiled.metadata.shared)


if __name__ == "__main__":
    print(json.dumps([asdict(compile_here(Job(**job))) for job in json.load(sys.stdin)]))
