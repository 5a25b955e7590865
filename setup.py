"""Only what pyproject.toml cannot say: the CPU kernels are built if there is a compiler, and left out if not."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError


class BuildKernels(build_ext):
    """With OpenMP where the compiler has it: then the threads are torch's own."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args.remove("-fopenmp")
            super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "mslmn.ops._cpu",
            sources=["src/mslmn/ops/cpu.cpp"],
            language="c++",
            extra_compile_args=["-std=gnu++17", "-O3", "-ffp-contract=fast", "-Wno-psabi", "-fopenmp"],
            extra_link_args=["-pthread", "-fopenmp"],
            optional=True,
        )
    ],
)
