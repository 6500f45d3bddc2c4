"""The one compiled part: the inner loops of the weight codec. Without a compiler the package installs and runs on numpy."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "slimebus.weights._kernel",
            sources=["slimebus/weights/kernel.c"],
            extra_compile_args=["-O3", "-std=gnu99", "-fno-strict-aliasing", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
