"""The Triton kernels: one launch updates any number of tensors, whose addresses stand in a table.

A row of the table is one tensor; its columns say where it is read and where it is written, which is one place unless it
is flipped. A program updates some tiles of one row. The order of operations, and where they are fused, is that of
torch 2.13's own fused kernels.

With TRITON_INTERPRET=1 the kernels run on tensors in host memory.
"""
