// See local_store.h.
#include "rendezvous/local_store.h"

#include <charconv>
#include <limits>
#include <sstream>

#include "core/errors.h"

namespace pycomm::rendezvous {

void LocalStore::set(const std::string& key, const std::string& value,
                     const Deadline& /*deadline*/) {
  set_within(key, value, std::numeric_limits<size_t>::max());
}

bool LocalStore::set_within(const std::string& key, const std::string& value, size_t max_bytes) {
  const std::lock_guard lock(mutex_);
  return put(key, value, max_bytes);
}

// With the mutex held.
bool LocalStore::put(const std::string& key, const std::string& value, size_t max_bytes) {
  const auto old = values_.find(key);
  const size_t freed = old == values_.end() ? 0 : key.size() + old->second.size();
  const size_t bytes = bytes_ - freed + key.size() + value.size();
  if (bytes > max_bytes) return false;
  values_[key] = value;
  bytes_ = bytes;
  changed_.notify_all();
  return true;
}

int64_t LocalStore::add(const std::string& key, int64_t amount, const Deadline& /*deadline*/) {
  return add_within(key, amount, std::numeric_limits<size_t>::max()).value();
}

std::optional<int64_t> LocalStore::add_within(const std::string& key, int64_t amount,
                                              size_t max_bytes) {
  const std::lock_guard lock(mutex_);
  int64_t sum = 0;
  if (const auto old = values_.find(key); old != values_.end()) {
    const char* end = old->second.data() + old->second.size();
    const auto parsed = std::from_chars(old->second.data(), end, sum);
    if (parsed.ec != std::errc{} || parsed.ptr != end)
      throw InvalidArgument("cannot add to the key '" + key +
                            "': its value is not a 64-bit integer");
  }
  if (__builtin_add_overflow(sum, amount, &sum))
    throw InvalidArgument("cannot add to the key '" + key + "': the sum exceeds 64 bits");
  if (!put(key, std::to_string(sum), max_bytes)) return std::nullopt;
  return sum;
}

std::string LocalStore::claim(const std::string& key, const std::string& value,
                              const Deadline& /*deadline*/) {
  return claim_within(key, value, std::numeric_limits<size_t>::max()).value();
}

std::optional<std::string> LocalStore::claim_within(const std::string& key,
                                                    const std::string& value, size_t max_bytes) {
  const std::lock_guard lock(mutex_);
  if (const auto found = values_.find(key); found != values_.end()) return found->second;
  if (!put(key, value, max_bytes)) return std::nullopt;
  return value;
}

std::optional<std::string> LocalStore::remove(const std::string& key,
                                              const Deadline& /*deadline*/) {
  const std::lock_guard lock(mutex_);
  auto taken = values_.extract(key);
  if (taken.empty()) return std::nullopt;
  bytes_ -= key.size() + taken.mapped().size();
  return std::move(taken.mapped());
}

std::string LocalStore::get(const std::string& key, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  while (!values_.contains(key)) {
    if (deadline.expired()) throw_key_timeout(key, deadline, "this process's store");
    changed_.wait_until(lock, Clock::now() + deadline.left());
  }
  return values_[key];
}

std::optional<std::string> LocalStore::find(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

void throw_key_timeout(const std::string& key, const Deadline& deadline, const std::string& store) {
  std::ostringstream text;
  text.precision(3);
  text << "timed out: no rank set the key '" << key << "' in " << store << " within "
       << deadline.limit_s() << " s";
  ErrorFields fields;
  fields.elapsed_s = deadline.elapsed_s();
  throw Timeout(text.str(), fields);
}

}  // namespace pycomm::rendezvous
