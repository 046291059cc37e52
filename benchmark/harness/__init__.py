"""What the programs of benchmark/ measure with. A program imports from here, and from no other program.

program      how every program starts: the library or the reason why not, the device, types of arguments
problems     a problem, its inputs, and a row of a table: all contenders timed together and checked
timing       how time is taken
contenders   what is compared: this library's kernels, SDPA's backends, other libraries
accuracy     whether a result is right
environment  what machine, what versions, what was compiled
report       tables, progress, plots
sweep        head dims and lengths at a fixed amount of data: forward.py, backward.py, builds.py
emulated     the CUDA kernels in the emulator, on a machine without a GPU
build_worker one build of the library in a process of its own: builds.py
profilers    what ncu.py, rocprof.py, calibrate.py and the sweep of rungs share
rungs        `tiles.py rungs`
"""
