// See request_handler.h.
#include "rendezvous/request_handler.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "core/errors.h"

namespace pycomm::rendezvous {

using store_frame::kMaxStoreBytes;
using store_frame::Reply;
using store_frame::Request;
using store_frame::Status;
using store_frame::Verb;

RequestHandler::RequestHandler(std::string hello, const os::WakeEvent& changed)
    : hello_(std::move(hello)), changed_(changed) {}

std::optional<Reply> RequestHandler::handle(const Request& request) {
  if (request.verb == Verb::hello) return Reply{Status::ok, hello_};
  if (request.verb == Verb::get) {
    auto value = keys_.find(request.key);
    if (!value) return std::nullopt;
    return Reply{Status::ok, std::move(*value)};
  }
  Reply reply = change_once(request);
  changed_.notify();
  return reply;
}

// Applies a change, or returns the kept reply if the change was already applied.
Reply RequestHandler::change_once(const Request& request) {
  if (request.number == 0) return change(request);
  ClientReplies& kept = replies_[request.client];
  kept.oldest = std::max(kept.oldest, request.oldest);
  kept.replies.erase(kept.replies.begin(), kept.replies.lower_bound(kept.oldest));
  if (request.number < kept.oldest)
    return {Status::refused, "outdated request: its client no longer waits for it"};
  const auto found = kept.replies.find(request.number);
  if (found != kept.replies.end()) return found->second;
  return kept.replies.emplace(request.number, change(request)).first->second;
}

// Applies a set, add, remove or claim.
Reply RequestHandler::change(const Request& request) {
  if (request.verb == Verb::set) {
    const bool fits = keys_.set_within(request.key, request.value, kMaxStoreBytes);
    return {fits ? Status::ok : Status::full, ""};
  }
  if (request.verb == Verb::remove) {
    auto value = keys_.remove(request.key);
    if (!value) return {Status::absent, ""};
    return {Status::ok, std::move(*value)};
  }
  if (request.verb == Verb::claim) {
    auto value = keys_.claim_within(request.key, request.value, kMaxStoreBytes);
    if (!value) return {Status::full, ""};
    return {Status::ok, std::move(*value)};
  }
  return add(request);
}

Reply RequestHandler::add(const Request& request) {
  int64_t amount = 0;
  const char* end = request.value.data() + request.value.size();
  const auto parsed = std::from_chars(request.value.data(), end, amount);
  if (parsed.ec != std::errc{} || parsed.ptr != end)
    return {Status::refused, "invalid amount of an add: not a 64-bit integer"};
  try {
    const auto sum = keys_.add_within(request.key, amount, kMaxStoreBytes);
    if (!sum) return {Status::full, ""};
    return {Status::ok, std::to_string(*sum)};
  } catch (const InvalidArgument& error) {  // the client raises it
    return {Status::refused, error.what()};
  }
}

}  // namespace pycomm::rendezvous
