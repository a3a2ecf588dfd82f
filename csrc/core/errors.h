// The error classes, the same in C++, in Python and in goodbye messages.
//
// Usage errors (InvalidArgument, Unsupported, Mismatch): no array was changed, unless the text says
// so, and the group stays usable. Remote failures (Timeout, PeerLost): the group is permanently
// broken, and every later call raises GroupBroken with the first cause. InternalError: a bug in
// this library.
#pragma once

#include <array>
#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace pycomm {

enum class ErrorKind : uint8_t {
  invalid_argument,
  unsupported,
  mismatch,
  timeout,
  peer_lost,
  group_broken,
  internal,
};

// The Python class of each kind; pycomm/errors.py defines them in this order.
inline constexpr std::array<std::string_view, 7> kErrorNames{
    "InvalidArgument", "Unsupported", "Mismatch",     "Timeout",
    "PeerLost",        "GroupBroken", "InternalError"};

// The attributes of an error. A field that does not apply keeps its default.
struct ErrorFields {
  std::string op{};       // "all_reduce", "init", ...
  int64_t sequence = -1;  // index of the call in the group, from 0
  int rank = -1;          // the rank that raises
  int peer = -1;          // the rank that is to blame
  double elapsed_s = 0;
  int64_t bytes = -1;
  int unreachable = -1;  // a peer that this rank could not reach during group creation
};

class [[gnu::visibility("default")]] Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what, ErrorFields fields = {})
      : std::runtime_error(what), kind_(kind), fields_(std::move(fields)) {}
  ErrorKind kind() const { return kind_; }
  const ErrorFields& fields() const { return fields_; }

 private:
  ErrorKind kind_;
  ErrorFields fields_;
};

template <ErrorKind kKind>
class [[gnu::visibility("default")]] ErrorOf : public Error {
 public:
  explicit ErrorOf(const std::string& what, ErrorFields fields = {})
      : Error(kKind, what, std::move(fields)) {}
};

using InvalidArgument = ErrorOf<ErrorKind::invalid_argument>;
using Unsupported = ErrorOf<ErrorKind::unsupported>;
using Mismatch = ErrorOf<ErrorKind::mismatch>;
using Timeout = ErrorOf<ErrorKind::timeout>;
using PeerLost = ErrorOf<ErrorKind::peer_lost>;
using GroupBroken = ErrorOf<ErrorKind::group_broken>;
using InternalError = ErrorOf<ErrorKind::internal>;

// Checks an internal invariant: throws InternalError with the source location if it is false.
inline void check(bool holds, std::string_view what,
                  std::source_location at = std::source_location::current()) {
  if (!holds)
    throw InternalError(std::string(what) + " (" + at.file_name() + ":" +
                        std::to_string(at.line()) + "); this is a bug in pycomm");
}

}  // namespace pycomm
