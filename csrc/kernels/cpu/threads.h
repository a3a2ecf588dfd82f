// Sharing a loop between the threads of this process. Called by the other files of this folder.
#pragma once

#include <cstddef>
#include <functional>

namespace pycomm::cpu {

// task(i) for each i below `tasks`, in any order, by the caller and by waiting threads; returns
// when all are done. Tasks do not throw. Threads start when they are first needed and then wait for
// ever; while they work for one caller another does its tasks alone. A forked child starts its own.
void parallel(size_t tasks, const std::function<void(size_t)>& task);

}  // namespace pycomm::cpu
