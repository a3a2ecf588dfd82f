// The names of enumerators as Python passes them.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "core/dtype.h"
#include "core/errors.h"

namespace pycomm::bindings {

inline constexpr auto kDtypeNames = [] {
  std::array<std::string_view, kDtypes.size()> names{};
  for (size_t i = 0; i < names.size(); ++i) names[i] = kDtypes[i].name;
  return names;
}();

template <size_t kSize>
std::string list(const std::array<std::string_view, kSize>& names) {
  std::string text;
  for (const auto name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

// The index of a name in its table. Throws InvalidArgument listing the valid names.
template <typename Enum, size_t kSize>
Enum find(const std::array<std::string_view, kSize>& names, std::string_view name,
          std::string_view what) {
  for (size_t i = 0; i < kSize; ++i)
    if (names[i] == name) return static_cast<Enum>(i);
  throw InvalidArgument("unknown " + std::string(what) + " '" + std::string(name) +
                        "'; one of: " + list(names));
}

}  // namespace pycomm::bindings
