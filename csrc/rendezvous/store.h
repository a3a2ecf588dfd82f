// The rendezvous store: key-value pairs by which ranks exchange their addresses while a group is
// created, and later the values of the program (pycomm.user_set). No collective uses it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "core/deadline.h"

namespace pycomm::rendezvous {

// The default limit of a call.
inline Deadline store_limit() { return Deadline(std::chrono::seconds(30)); }

// Every call ends at its deadline, with Timeout if the store did not answer.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value,
                   const Deadline& deadline = store_limit()) = 0;
  // Waits until the key is set. Throws Timeout at the deadline.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
  // By key: the value, or nothing if it is not known.
  using Values = std::map<std::string, std::optional<std::string>>;
  // Waits for the values that are not known. Throws Timeout at the deadline; `values` has those
  // that were found.
  virtual void get_missing(Values& values, const Deadline& deadline);
  // The same, after set(). In one call if the store can; at a Timeout the key may not be set.
  virtual void exchange(const std::string& key, const std::string& value, Values& values,
                        const Deadline& deadline);
  // Adds to the number under the key (0 if the key is not set) atomically and returns the sum. The
  // value becomes the sum as decimal text. Throws InvalidArgument if the value is not a number.
  virtual int64_t add(const std::string& key, int64_t amount,
                      const Deadline& deadline = store_limit()) = 0;
  // Removes the key and returns its value, or nothing if it is not set. Of concurrent calls one
  // gets the value.
  virtual std::optional<std::string> remove(const std::string& key,
                                            const Deadline& deadline = store_limit()) = 0;
  // Sets the key if it is not set, and returns its value: the same one to all callers.
  virtual std::string claim(const std::string& key, const std::string& value,
                            const Deadline& deadline = store_limit()) = 0;
  // Whether it has a limit of bytes, so that values that are not needed any more are removed.
  virtual bool limited() const { return true; }
  // Whether a value that get_missing() did not find is certainly not set, even if it timed out.
  virtual bool shows_all() const { return false; }
  // All ranks are connected: from now on the store accepts only clients that reconnect.
  virtual void all_ranks_connected() {}
};

// store.get() in slices of at most 100 ms. Throws GroupBroken if `interrupted`, which may be empty,
// returns true between them.
std::string get_in_slices(Store& store, const std::string& key, const Deadline& deadline,
                          const std::function<bool()>& interrupted);

}  // namespace pycomm::rendezvous
