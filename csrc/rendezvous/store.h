// Where ranks that know nothing of each other leave their addresses while a group forms, and later
// what the program's user_set() leaves there. No collective uses it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "core/deadline.h"

namespace pycomm {

// The limit of a call whose caller gives none.
inline Deadline store_limit() { return Deadline(std::chrono::seconds(30)); }

// Every call ends at its deadline, with Timeout where the store has not answered.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value,
                   const Deadline& deadline = store_limit()) = 0;
  // Waits until somebody has set the key. Throws Timeout at the deadline.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
  // Adds to the number under the key, 0 if there is none, and gives the sum: all who add get
  // different ones. The value is then the sum as decimal text. Throws InvalidArgument where the
  // value is no number.
  virtual int64_t add(const std::string& key, int64_t amount,
                      const Deadline& deadline = store_limit()) = 0;
  // Takes the key away and gives its value, or nothing where it is not there. Of several who do so
  // at once one gets the value.
  virtual std::optional<std::string> remove(const std::string& key,
                                            const Deadline& deadline = store_limit()) = 0;
  // Sets the key if nobody has, and gives the value that stands: the same to all who claim it.
  virtual std::string claim(const std::string& key, const std::string& value,
                            const Deadline& deadline = store_limit()) = 0;
  // All ranks are connected: the store takes no new clients from now on, only those that reconnect.
  virtual void settle() {}
};

// store.get() in slices of at most 100 ms, between which `interrupted` is asked, where it is not
// empty: throws GroupBroken once it says yes.
std::string get_in_slices(Store& store, const std::string& key, const Deadline& deadline,
                          const std::function<bool()>& interrupted);

}  // namespace pycomm
