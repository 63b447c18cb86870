"""Print the assembly of the Triton kernels of quantisation, compiled for a GPU that need not be there."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.quantisation import triton_kernels as kernels

INTEGERS = ("count", "blocks", "rows_inner")
STRIDES = {"row_strides": 2, "value_strides": 3, "scale_strides": 2}


def assembly(function: triton.JITFunction, narrow: bool, architecture: int, **constants: object) -> str:
    """Return the PTX of one variant."""
    constants |= {"NARROW": narrow, "TILE": 8, "HALF": 128}
    types = {"rows": "*i16" if narrow else "*fp32", "values": "*i8", "scales": "*fp32"}
    types |= dict.fromkeys(INTEGERS, "i32") | {"largest_value": "fp32", "smallest": "fp32"}
    types |= {name: ("i64",) * count for name, count in STRIDES.items()}
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    source = ASTSource(
        function, signature, constexprs={(function.arg_names.index(n),): v for n, v in constants.items()}
    )
    return str(triton.compile(source, GPUTarget("cuda", architecture, 32), kernels._OPTIONS).asm["ptx"])


def main() -> None:
    """Print all variants, each after a line that begins with dashes."""
    for architecture in (80, 90):
        for narrow in (False, True):
            for bits in (8, 4):
                print("---", "quantise", architecture, bits, narrow)
                print(assembly(kernels._quantise, narrow, architecture, BITS=bits))
            print("---", "dequantise", architecture, 4, narrow)
            print(assembly(kernels._dequantise, narrow, architecture, BITS=4, ADD=not narrow))


if __name__ == "__main__":
    main()
