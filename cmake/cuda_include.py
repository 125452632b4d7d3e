"""Prints the folder of a header (cuda.h, or the one named) in one of NVIDIA's wheels that this interpreter sees."""

import sys
from pathlib import Path

header = sys.argv[1] if len(sys.argv) > 1 else "cuda.h"
wheels = {"cuda.h": "nvidia-cuda-runtime-cu12", "cufile.h": "nvidia-cufile-cu12"}
places = ("nvidia/cuda_runtime/include", "nvidia/cufile/include", "nvidia/cu13/include", "nvidia/cu12/include")
for entry in sys.path:
    for place in places:
        if Path(entry, place, header).is_file():
            print(Path(entry, place))
            sys.exit()
sys.exit(f"{header} was found neither in a CUDA toolkit nor in a wheel: pip install {wheels.get(header, '')}")
