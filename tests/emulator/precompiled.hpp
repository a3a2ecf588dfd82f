// What most files of the kernels and of their cases include, compiled once for each way to compile.
#include "core/precompiled.h"
#include "gpu.hpp"
