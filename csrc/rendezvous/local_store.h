// The store of ranks that are threads of one process. The TCP store's server keeps its keys in one.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "rendezvous/store.h"

namespace pycomm {

// From any thread.
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

  // The value if somebody has set it; never waits.
  std::optional<std::string> find(const std::string& key) const;
  // As set(), unless keys and values together would then exceed `max_bytes`: false.
  bool set_within(const std::string& key, const std::string& value, size_t max_bytes);
  // As add(), with the same limit: nothing if the sum has no room.
  std::optional<int64_t> add_within(const std::string& key, int64_t amount, size_t max_bytes);
  // As claim(): nothing if the value would be the first and has no room.
  std::optional<std::string> claim_within(const std::string& key, const std::string& value,
                                          size_t max_bytes);

 private:
  bool put(const std::string& key, const std::string& value, size_t max_bytes);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  size_t bytes_ = 0;  // of all keys and values
};

// What every store's get() throws at its deadline.
[[noreturn]] void throw_key_timeout(const std::string& key, const Deadline& deadline,
                                    const std::string& store);

}  // namespace pycomm
