// The headers that most bindings include, compiled once: see core/precompiled.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/precompiled.h"
