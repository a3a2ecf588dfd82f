// The options of the backend, which programs pass to init_process_group, new_group and split_group.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "bindings/c10d_devices.h"

namespace pycomm::bindings {

inline constexpr const char* kName = "pycomm";

class Options : public c10d::Backend::Options {
 public:
  Options(std::chrono::milliseconds timeout, DeviceOptions on_devices,
          std::optional<bool> encrypted, std::optional<bool> several_threads, std::string replaced)
      : c10d::Backend::Options(kName, timeout),
        devices(std::move(on_devices)),
        encrypt(encrypted),
        thread_multiple(several_threads),
        replaces(std::move(replaced)) {}
  // From torch 2.14 on this overrides a method that would copy the fields of the base alone.
  c10::intrusive_ptr<c10d::Backend::Options> clone() const {
    return c10::make_intrusive<Options>(*this);
  }
  DeviceOptions devices;
  // Read by Python, which connects the ranks; none: not given.
  std::optional<bool> encrypt, thread_multiple;
  // The backend of torch in whose place the program got this group: "gloo". Otherwise empty.
  std::string replaces;
};

}  // namespace pycomm::bindings
