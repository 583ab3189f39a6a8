"""Intrinsics that LLVM cannot select for a target, as functions of other instructions.

LLVM 22 ends the process where the minimum or the maximum of float64 is to be code for
32-bit ARM.
"""

import re
from typing import Final

from hopflow.compiler.llvm.module import Module

_EXTREMUM: Final = re.compile(
    r"(?P<type>.+) @llvm\.(?P<op>minimum|maximum)\.(v\d+)?f64\("
)


def expand_extrema(module: Module) -> None:
    """Replace the minimum and the maximum of float64 in a complete module."""
    for declaration in module.declarations:
        found = _EXTREMUM.match(declaration)
        if found is not None:
            intrinsic = declaration[declaration.index("@") + 1 : declaration.index("(")]
            own = f"hf.{intrinsic.removeprefix('llvm.')}"
            module.replace(declaration, own, _extremum(own, found["op"], found["type"]))


def _extremum(name: str, op: str, t: str) -> str:
    """Return the text of a function: NaN if either is; -0 is less than 0."""
    bits = t.replace("double", "i64")
    mask = t.replace("double", "i1")
    test, both = ("ogt", "and") if op == "maximum" else ("olt", "or")
    return f"""
define internal {t} @{name}({t} %x, {t} %y) alwaysinline nounwind {{
  %first = fcmp {test} {t} %x, %y
  %chosen = select {mask} %first, {t} %x, {t} %y
  %x.bits = bitcast {t} %x to {bits}
  %y.bits = bitcast {t} %y to {bits}
  %both.bits = {both} {bits} %x.bits, %y.bits
  %both = bitcast {bits} %both.bits to {t}
  %equal = fcmp oeq {t} %x, %y
  %number = select {mask} %equal, {t} %both, {t} %chosen
  %sum = fadd {t} %x, %y
  %nan = fcmp uno {t} %x, %y
  %result = select {mask} %nan, {t} %sum, {t} %number
  ret {t} %result
}}
"""
