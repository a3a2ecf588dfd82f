// The rendezvous store in memory: for ranks that are threads of one process, and for the keys of
// the TCP store's server.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "rendezvous/store.h"

namespace pycomm::rendezvous {

// Thread-safe.
class LocalStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value,
           const Deadline& deadline = store_limit()) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  int64_t add(const std::string& key, int64_t amount,
              const Deadline& deadline = store_limit()) override;
  std::optional<std::string> remove(const std::string& key,
                                    const Deadline& deadline = store_limit()) override;
  std::string claim(const std::string& key, const std::string& value,
                    const Deadline& deadline = store_limit()) override;

  // The value, or nothing if the key is not set; never waits.
  std::optional<std::string> find(const std::string& key) const;
  // As set(); false, without effect, if keys and values together would exceed `max_bytes`.
  bool set_within(const std::string& key, const std::string& value, size_t max_bytes);
  // As add(); nothing if the sum would exceed the limit.
  std::optional<int64_t> add_within(const std::string& key, int64_t amount, size_t max_bytes);
  // As claim(); nothing if the value would be the first and exceed the limit.
  std::optional<std::string> claim_within(const std::string& key, const std::string& value,
                                          size_t max_bytes);

 private:
  bool put(const std::string& key, const std::string& value, size_t max_bytes);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  size_t bytes_ = 0;  // of all keys and values
};

// Throws the Timeout of get() for every store.
[[noreturn]] void throw_key_timeout(const std::string& key, const Deadline& deadline,
                                    const std::string& store);

}  // namespace pycomm::rendezvous
