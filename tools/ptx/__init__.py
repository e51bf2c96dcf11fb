"""Runs compiled kernels on a CPU: a functional executor of the PTX that Triton makes of them.

    parse        text to blocks of instructions
    integers     what instructions on integers, bits and predicates compute
    floats       ... on floating point
    conversions  ... from one type to another
    memory       global memory, which is the bytes of torch tensors; shared memory, which watches for races
    warps        what the threads of a warp tell each other
    threads      the registers of all threads as arrays
    exchange     instructions that access memory, wait, or exchange values between threads
    machine      what each instruction does; branches
    compiled     compiles a launch for a GPU, and runs it

The semantics follow the PTX ISA. An instruction that no table names is refused, never skipped. That compiled
kernels have the digits of their references (`test_compiled`) also proves the executor.
"""
