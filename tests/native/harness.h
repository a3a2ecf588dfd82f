// A minimal test harness: a name, a body, and checks that say where they failed.
//
//   const Test kAdds("adds", [] { expect_equal(1 + 1, 2, "sum"); });
//
// harness.cpp holds main(): `suite [part of a name]` runs the tests whose name contains it and ends
// with "N passed, M failed". A test whose name begins with "long: " runs only on request.
#pragma once

#include <functional>
#include <latch>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// Parts of names: a suite that includes another's tests keeps those that match; empty: all.
inline std::vector<std::string> only;

struct Test {
  Test(std::string name, std::function<void()> body);
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void expect(bool holds, const std::string& what,
                   std::source_location at = std::source_location::current()) {
  if (!holds)
    throw Failure(std::string(at.file_name()) + ":" + std::to_string(at.line()) + ": " + what);
}

template <typename A, typename B>
void expect_equal(const A& got, const B& wanted, const std::string& what,
                  std::source_location at = std::source_location::current()) {
  if (got == wanted) return;
  std::ostringstream text;
  text << what << ": got " << got << ", wanted " << wanted;
  expect(false, text.str(), at);
}

inline void expect_says(const std::string& text, const std::string& part,
                        std::source_location at = std::source_location::current()) {
  expect(text.find(part) != std::string::npos, "'" + text + "' does not say '" + part + "'", at);
}

// Runs `body`, which must throw `Wanted`; returns the text.
template <typename Wanted>
std::string expect_throws(const std::function<void()>& body,
                          std::source_location at = std::source_location::current()) {
  try {
    body();
  } catch (const Wanted& error) {
    return error.what();
  }
  expect(false, "nothing was thrown", at);
  return {};
}

// Counts down at the end of its scope, also where a check fails.
struct CountDown {
  std::latch& latch;
  ~CountDown() { latch.count_down(); }
};
