// Shared by the suites that prove plans: the plans of all ranks for a case, and its name.
#pragma once

#include <string>
#include <vector>

#include "core/operation.h"
#include "prove.h"

namespace pycomm {

std::vector<collectives::Plan> plans_of(Algorithm algorithm, int size, const Case& what);

std::string title(Algorithm algorithm, int size, const Case& what);

}  // namespace pycomm
