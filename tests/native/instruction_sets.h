// Instruction sets and numbers of threads of the CPU kernels, for suites.
#pragma once

#include <string>

#include "core/errors.h"
#include "cpu/isa.h"
#include "kernels/device_kernels.h"

namespace pycomm {

// Runs `body` on every instruction set of this machine, with one thread and with three.
template <typename Body>
void on_each_isa(Body body) {
  const std::string before(cpu::kernel_isa());
  const int threads = kernels::kernel_threads();
  for (const auto name : cpu::kIsaNames) {
#ifdef __SANITIZE_THREAD__  // the threads share the same memory, whatever their instructions
    if (name != before) continue;
#endif
    try {
      cpu::set_kernel_isa(name);
    } catch (const Unsupported&) {  // this processor lacks it
      continue;
    }
    for (const int n : {1, 3}) {
      kernels::set_kernel_threads(n);
      body(std::string(name) + " with " + std::to_string(n) + " threads");
    }
  }
  cpu::set_kernel_isa(before);
  kernels::set_kernel_threads(threads);
}

}  // namespace pycomm
