#include "scatter.hpp"

#include <algorithm>

#include "crc32c.hpp"
#include "error.hpp"

namespace zs {
namespace {
constexpr uint64_t kStreamed = 16 << 10;  // runs from this length on are checked while they are copied

bool on_device(const Arrays& targets, size_t first, size_t last, const Device& device) {
  for (size_t k = first; k < last; ++k)
    if (targets.place(k) == device.ordinal()) return true;
  return false;
}

template <class Fills>
uint64_t parts_of(const Fills& fills) {
  uint64_t parts = 0;
  for (const auto& fill : fills) parts += fill.lane->coming;
  return parts;
}

}  // namespace

void Scatter::check(const Plan& plan, const Arrays& targets, const std::vector<uint32_t>& pieces) {
  if (targets.data.size() != pieces.size())
    throw Error(Kind::usage, std::to_string(targets.data.size()) + " targets for " +
                                 std::to_string(pieces.size()) + " pieces");
  for (size_t k = 0; k < pieces.size(); ++k) {
    if (pieces[k] >= plan.pieces())
      throw Error(Kind::usage, "there is no piece " + std::to_string(pieces[k]) + " in the plan");
    const uint64_t have = (*targets.geometries)[k].nbytes;
    if (have != plan.size(pieces[k]))
      throw Error(Kind::usage, "target " + std::to_string(k) + " has " + std::to_string(have) +
                                   " bytes, piece " + std::to_string(pieces[k]) + " has " +
                                   std::to_string(plan.size(pieces[k])));
  }
}

std::vector<Scatter::Share> Scatter::cut(const Plan& plan, const std::vector<uint32_t>& pieces) {
  std::vector<Share> shares;
  for (size_t k = 0; k < pieces.size(); ++k) {
    const uint64_t begin = plan.offset(pieces[k]), size = plan.size(pieces[k]);
    if (size == 0) continue;
    for (uint64_t chunk = begin / plan.chunk_bytes(); chunk <= (begin + size - 1) / plan.chunk_bytes();
         ++chunk) {
      if (shares.empty() || shares.back().chunk != chunk) shares.push_back({chunk, k, k});
      shares.back().last = k + 1;
    }
  }
  return shares;
}

std::shared_ptr<Scatter> Scatter::begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets,
                                        const std::byte* image, std::vector<uint32_t> pieces,
                                        std::optional<std::vector<uint32_t>> checksums,
                                        std::span<const Training> trainings) {
  check(*plan, targets, pieces);
  check_devices(targets, trainings);
  if (checksums && checksums->size() != plan->chunks())
    throw Error(Kind::usage, std::to_string(checksums->size()) + " checksums for " +
                                 std::to_string(plan->chunks()) + " chunks");
  std::vector<Share> shares = cut(*plan, pieces);
  std::vector<Fill> fills = fills_of(targets, image, shares, trainings);
  std::shared_ptr<Scatter> job(new Scatter(
      pool, std::move(plan), std::move(targets), image, std::move(pieces),
      std::move(checksums).value_or(std::vector<uint32_t>{}), std::move(shares), std::move(fills)));
  try {
    job->start_lanes();
  } catch (...) {
    job->cancel();  // no lane has been given anything yet
    throw;
  }
  job->start();
  return job;
}

std::vector<Scatter::Fill> Scatter::fills_of(const Arrays& targets, const std::byte* image,
                                             const std::vector<Share>& shares,
                                             std::span<const Training> trainings) {
  std::vector<Fill> fills;
  for (const Training& training : trainings) {
    training.device->refuse_capturing(training.stream);
    auto lane = std::make_shared<Lane>();
    lane->way = cuda::Way::to_device;
    for (const Share& share : shares)
      if (on_device(targets, share.first, share.last, *training.device)) ++lane->coming;
    if (lane->coming == 0) continue;
    lane->pinned = cuda::is_pinned(image);
    fills.push_back({training, std::move(lane)});
  }
  for (size_t k = 0; k < targets.data.size(); ++k)
    if (targets.place(k) != Arrays::kHost && !(*targets.geometries)[k].contiguous())
      throw Error(Kind::capability, "target " + std::to_string(k) + " is strided and on a device");
  return fills;
}

void Scatter::start_lanes() {
  for (const Fill& fill : fills_) {
    fill.lane->landing = this;
    fill.training.device->begin(fill.lane, fill.training.stream, {}, cuda::Way::within, shared_from_this());
  }
}

// A part's name is its number of bytes.
void Scatter::landed(std::span<const uint64_t> parts) noexcept {
  for (const uint64_t nbytes : parts) add_progress(nbytes);
  retire(parts.size());
}

void Scatter::dropped(uint64_t parts, std::exception_ptr why) noexcept {
  fail(std::move(why));
  retire(parts);
}

uint64_t Scatter::drop_kept() noexcept {
  uint64_t parts = 0;
  for (const Fill& fill : fills_) parts += fill.training.device->drop(*fill.lane);
  return parts;
}

Scatter::Scatter(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays targets, const std::byte* image,
                 std::vector<uint32_t> pieces, std::vector<uint32_t> checksums, std::vector<Share> shares,
                 std::vector<Fill> fills)
    : Job(pool.workers(), shares.size() + parts_of(fills), parts_of(fills)),
      plan_(std::move(plan)),
      targets_(std::move(targets)),
      image_(image),
      pieces_(std::move(pieces)),
      checksums_(std::move(checksums)),
      shares_(std::move(shares)),
      fills_(std::move(fills)) {}

void Scatter::work(uint64_t unit) {
  const Share& share = shares_[unit];
  const uint64_t begin = plan_->chunk_begin(share.chunk), end = plan_->chunk_end(share.chunk);
  const bool checking = !checksums_.empty();
  uint64_t checked = begin;  // the checksum covers [begin, checked)
  uint32_t value = 0;
  const auto check_to = [&](uint64_t to) {
    if (checking) value = crc32c(image_ + checked, to - checked, value);
    checked = to;
  };
  for (size_t k = share.first; k < share.last; ++k) {
    const uint64_t offset = plan_->offset(pieces_[k]);
    const uint64_t from = std::max(begin, offset), to = std::min(end, offset + plan_->size(pieces_[k]));
    if (from >= to || targets_.place(k) != Arrays::kHost) continue;
    const Geometry& geometry = (*targets_.geometries)[k];
    check_to(from);
    if (checking && geometry.contiguous() && to - from >= kStreamed) {
      value = crc32c_copy(targets_.data[k] + (from - offset), image_ + from, to - from, value);
      checked = to;
    } else {
      check_to(to);
      scatter(targets_.data[k], image_ + from, geometry, from - offset, to - offset);
    }
    add_progress(to - from);
  }
  check_to(end);
  if (checking && value != checksums_[share.chunk])
    throw Error(Kind::corrupt, "chunk " + std::to_string(share.chunk) + " of " +
                                   std::to_string(plan_->chunks()) + " fails its checksum");
  for (const Fill& fill : fills_) {
    const Device& device = *fill.training.device;
    if (!on_device(targets_, share.first, share.last, device)) continue;
    std::vector<cuda::Copy> copies;
    uint64_t nbytes = 0;
    for (size_t k = share.first; k < share.last; ++k) {
      const uint64_t offset = plan_->offset(pieces_[k]);
      const uint64_t from = std::max(begin, offset), to = std::min(end, offset + plan_->size(pieces_[k]));
      if (from >= to || targets_.place(k) != device.ordinal()) continue;
      copies.push_back({reinterpret_cast<CUdeviceptr>(targets_.data[k] + (from - offset)),
                        reinterpret_cast<CUdeviceptr>(image_ + from), to - from});
      nbytes += to - from;
    }
    fill.training.device->extend(*fill.lane, nbytes, copies);
  }
}

}  // namespace zs
