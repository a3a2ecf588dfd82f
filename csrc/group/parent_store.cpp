#include "group/parent_store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <span>

#include "core/errors.h"
#include "core/sha256.h"
#include "os/futex.h"

namespace pycomm::group {
namespace {

using shared::SharedValue;

// Never 0, which marks a free place.
uint64_t hash_of(const std::string& key) {
  const Digest digest = sha256(key);
  uint64_t hash = 0;
  std::memcpy(&hash, digest.data(), sizeof hash);
  return hash | 1;
}

std::optional<std::string> value_in(const SharedValue& place, const std::string& key) {
  const auto found = place.content.try_load();
  if (!found || found->key_bytes != key.size()) return std::nullopt;
  const std::string_view text(found->text.data(), found->text.size());
  if (found->bytes > text.size() - key.size() || !text.starts_with(key)) return std::nullopt;
  return std::string(text.substr(key.size(), found->bytes));
}

}  // namespace

bool ParentStore::publish(const std::string& key, const std::string& value) {
  SharedValue::Content content{.key_bytes = key.size(), .bytes = value.size(), .text = {}};
  if (key.size() + value.size() > content.text.size()) return false;
  uint32_t used = region_.used_values.load();
  size_t place = 0;
  do {
    place = static_cast<size_t>(std::countr_one(used));
    if (place >= shared::kSharedValues) return false;
  } while (!region_.used_values.compare_exchange_weak(used, used | 1U << place));
  std::ranges::copy(key + value, content.text.begin());
  place_ = place;
  key_ = key;
  SharedValue& own = region_.own().values[place];
  own.content.store(content);
  own.hash.store(hash_of(key), std::memory_order_release);
  for (int i = 0; i < region_.size(); ++i) {
    if (i == region_.rank()) continue;
    region_.of(i).values_changed.fetch_add(1);
    os::wake_waiters(region_.of(i).values_changed);
  }
  return true;
}

void ParentStore::withdraw() {
  if (!place_) return;
  region_.own().values[*place_].hash.store(0, std::memory_order_release);
  region_.used_values.fetch_and(~(1U << *place_));
  place_.reset();
}

// Whether all values are known.
bool ParentStore::find(Values& values) const {
  std::map<uint64_t, Values::value_type*> missing;
  for (auto& one : values)
    if (!one.second) missing.emplace(hash_of(one.first), &one);
  for (int i = 0; i < region_.size() && !missing.empty(); ++i)
    for (const SharedValue& place : region_.of(i).values) {
      const auto wanted = missing.find(place.hash.load(std::memory_order_acquire));
      if (wanted == missing.end()) continue;
      auto& [key, value] = *wanted->second;
      value = value_in(place, key);
      if (value) missing.erase(wanted);
    }
  return missing.empty();
}

bool ParentStore::shows_all() const {
  for (int i = 0; i < region_.size(); ++i)
    if (std::ranges::none_of(region_.of(i).values, [](const SharedValue& place) {
          return place.hash.load(std::memory_order_acquire) == 0;
        }))
      return false;
  return place_.has_value();
}

bool ParentStore::wait_for(Values& values, const Deadline& deadline) const {
  const std::atomic<uint32_t>& changed = region_.own().values_changed;
  for (;;) {
    const uint32_t seen = changed.load();
    if (find(values)) return true;
    if (deadline.expired()) return false;
    os::wait_for_change(changed, seen, deadline.left());
  }
}

void ParentStore::exchange(const std::string& key, const std::string& value, Values& values,
                           const Deadline& deadline) {
  if (!publish(key, value)) return store_.exchange(key, value, values, deadline);
  if (!wait_for(values, deadline)) throw Timeout("ranks of the new group are missing");
}

void ParentStore::get_missing(Values& values, const Deadline& deadline) {
  if (!wait_for(values, deadline))
    store_.get_missing(values, Deadline(std::chrono::nanoseconds{0}));
}

std::string ParentStore::get(const std::string& key, const Deadline& deadline) {
  Values one{{key, std::nullopt}};
  return find(one) ? *one.begin()->second : store_.get(key, deadline);
}

std::optional<std::string> ParentStore::remove(const std::string& key, const Deadline& deadline) {
  if (place_ && key == key_) withdraw();
  return store_.remove(key, deadline);
}

}  // namespace pycomm::group
