// What training has on devices of the stand-in driver: tensors that its stream writes, and room for their
// image.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "../capture.hpp"
#include "../crc32c.hpp"
#include "../pinned.hpp"
#include "check.hpp"
#include "stand_in.hpp"

namespace training {

inline constexpr uint64_t kChunk = 16 << 10;

struct Opened {
  std::shared_ptr<zs::Device> device;
  explicit Opened(int ordinal) : device(zs::Device::open(ordinal)) {}
  ~Opened() { device->close(); }
};

inline CUstream new_stream(const Opened& opened) {
  const zs::cuda::Context::Current current(*opened.device->context());
  CUstream stream = nullptr;
  ZS_CUDA(cuStreamCreateWithPriority, &stream, CU_STREAM_NON_BLOCKING, 0);
  return stream;
}

// Each tensor is one byte value all over, so that one kernel writes it whole.
struct State {
  std::vector<std::byte*> data;
  std::vector<uint64_t> sizes;
  std::vector<int16_t> places;
  std::vector<std::vector<std::byte>> host;
  std::shared_ptr<const zs::Plan> plan;
  zs::Arrays arrays;

  State(size_t count, const std::vector<const Opened*>& devices, bool some_on_host) {
    std::mt19937_64 random(count);
    auto geometries = std::make_shared<std::vector<zs::Geometry>>();
    std::vector<uint64_t> offsets;
    uint64_t at = 64;
    for (size_t k = 0; k < count; ++k) {
      // Some lie next to one another, on the device and in the image, and still in allocations of their own.
      const uint64_t nbytes = k % 3 != 2 ? 512 * (1 + random() % 40) : 4 * (1 + random() % 300);
      const size_t where = random() % (devices.size() + (some_on_host ? 1 : 0));
      sizes.push_back(nbytes);
      if (where == devices.size()) {
        places.push_back(zs::Arrays::kHost);
        host.emplace_back(nbytes);
        data.push_back(host.back().data());
      } else {
        const zs::cuda::Context::Current current(*devices[where]->device->context());
        CUdeviceptr memory = 0;
        ZS_CUDA(cuMemAlloc, &memory, nbytes);
        places.push_back(static_cast<int16_t>(devices[where]->device->ordinal()));
        data.push_back(reinterpret_cast<std::byte*>(memory));
      }
      const int64_t shape[] = {static_cast<int64_t>(nbytes / 4)}, strides[] = {4};
      geometries->push_back(zs::Geometry::of(4, shape, strides));
      offsets.push_back(at);
      at += nbytes + (k % 3 == 0 ? 0 : random() % 3);
    }
    plan = std::make_shared<zs::Plan>(at, std::string(64, 'h'), kChunk, offsets, sizes);
    arrays.data = data;
    arrays.geometries = std::move(geometries);
    arrays.places = std::make_shared<std::vector<int16_t>>(places);
  }

  // As training would: the host's at once, a device's by its stream.
  void write(size_t k, int value, const std::vector<zs::Training>& trainings, int us = 0) {
    if (places[k] == zs::Arrays::kHost) {
      std::memset(data[k], value, sizes[k]);
      return;
    }
    for (const zs::Training& training : trainings)
      if (training.device->ordinal() == places[k])
        stand_in::work(training.stream, us, reinterpret_cast<CUdeviceptr>(data[k]), sizes[k], value);
  }
  std::vector<std::byte> image(int value) const {
    std::vector<std::byte> result(plan->nbytes());
    std::memset(result.data(), 'h', 64);
    for (size_t k = 0; k < sizes.size(); ++k) std::memset(result.data() + plan->offset(k), value, sizes[k]);
    return result;
  }
};

// A segment that the driver knows, or does not.
struct Image {
  zs::Segment segment;
  Image(const State& state, const Opened* pin) : segment("test", state.plan->nbytes()) {
    if (pin != nullptr)
      segment.mapping()->attach(
          std::make_shared<zs::Pinned>(pin->device->context(), *segment.mapping(), uint64_t{1} << 30, 2));
  }
  std::byte* data() const { return segment.mapping()->data(); }
  bool is(const std::vector<std::byte>& expected) const {
    return std::memcmp(data(), expected.data(), expected.size()) == 0;
  }
};

inline std::vector<uint32_t> checksums_of(const std::vector<std::byte>& image) {
  std::vector<uint32_t> result;
  for (uint64_t at = 0; at < image.size(); at += kChunk)
    result.push_back(zs::crc32c(image.data() + at, std::min<uint64_t>(kChunk, image.size() - at)));
  return result;
}

}  // namespace training
