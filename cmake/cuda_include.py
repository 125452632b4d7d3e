"""Prints the folder of cuda.h in one of NVIDIA's wheels that this interpreter sees."""

import sys
from pathlib import Path

places = ("nvidia/cuda_runtime/include", "nvidia/cu13/include", "nvidia/cu12/include")
for entry in sys.path:
    for place in places:
        if Path(entry, place, "cuda.h").is_file():
            print(Path(entry, place))
            sys.exit()
sys.exit("cuda.h was found neither in a CUDA toolkit nor in a wheel: pip install nvidia-cuda-runtime-cu12")
