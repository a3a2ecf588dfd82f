// Runs a loop on the kernel threads of this process.
#pragma once

#include <cstddef>
#include <functional>

namespace pycomm::kernels {

// Calls task(i) for each i below `tasks`, in any order, on the caller and on waiting threads;
// returns when all are done. Tasks must not throw. Threads start at first use and stay until the
// process ends. While they work for one caller, another caller runs its tasks alone. A forked child
// starts its own threads.
void parallel(size_t tasks, const std::function<void(size_t)>& task);

// The same for tasks that may throw: all are run, and then the first error, by task, is thrown.
void parallel_or_throw(size_t tasks, const std::function<void(size_t)>& task);

}  // namespace pycomm::kernels
