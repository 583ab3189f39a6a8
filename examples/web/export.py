"""Pages that run programs as WebAssembly: the Mandelbrot set, and a network that
recognizes a digit that is drawn with the mouse.

    python examples/web/export.py build/web
    python -m http.server -d build/web

They are then at http://localhost:8000/mandelbrot.html and /digits.html.
"""

import runpy
import shutil
import sys
from pathlib import Path

import hopflow as hf

HERE = Path(__file__).parent


def mandelbrot():
    """The picture of any part of the set, at any size."""
    escape_time = runpy.run_path(str(HERE.parent / "mandelbrot.py"))["escape_time"]

    def mandelbrot(xs, ys, limit):
        """How many steps each point takes, i32[height, width]."""

        def row(y):
            return hf.map(lambda x: escape_time(x, y, limit), xs)

        return hf.astype(hf.map(row, ys), hf.int32)

    axis = hf.linspace(0.0, 1.0, 8, dtype=hf.float64)
    width, height = hf.Dim("width", min=1), hf.Dim("height", min=1)
    return hf.export(
        mandelbrot, (axis, axis, 50), dynamic_shapes=[{0: width}, {0: height}, None]
    )


def digits(layers):
    """The network of `adaptive_computation.py`, for one image."""
    think = runpy.run_path(str(HERE.parent / "adaptive_computation.py"))["think"]

    def digits(image):
        thought = think(layers, image)
        likely = hf.exp(thought.answer - hf.logsumexp(thought.answer))
        return {"digit": hf.argmax(likely), "likely": likely, "steps": thought.steps}

    return hf.export(digits, (hf.zeros((64,)),))


def write(folder, layers):
    """Write the programs and the pages."""
    for program in (mandelbrot(), digits(layers)):
        code = program.to_wasm(folder)
        code.page.rename(code.page.with_name(f"{code.name}_form.html"))
        shutil.copy(HERE / f"{code.name}.html", folder)


def main(folder):
    network = runpy.run_path(str(HERE.parent / "adaptive_computation.py"))
    print("training ...")
    write(folder, network["train"](lambda epoch, layers: None))
    print(f"python -m http.server -d {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/web"))
