// Where ranks that know nothing of each other leave their addresses. Used while a group forms and
// never after.
#pragma once

#include <string>

#include "core/deadline.h"

namespace pycomm {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits until somebody has set the key. Throws Timeout at the deadline.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
};

}  // namespace pycomm
