#include "ptx.hpp"

#include <algorithm>
#include <array>
#include <sstream>
#include <stdexcept>

#include "fake.hpp"

namespace fake {
namespace {

constexpr uint32_t kLanes = 32;
using Lanes = std::array<uint64_t, kLanes>;

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(trimmed(part));
  return parts;
}

uint64_t load(uint64_t at, int width) {
  switch (width) {
    case 1:
      return __atomic_load_n(reinterpret_cast<const uint8_t*>(at), __ATOMIC_RELAXED);
    case 4:
      return __atomic_load_n(reinterpret_cast<const uint32_t*>(at), __ATOMIC_RELAXED);
    default:
      return __atomic_load_n(reinterpret_cast<const uint64_t*>(at), __ATOMIC_RELAXED);
  }
}

uint64_t computed(const std::string& verb, int width, uint64_t a, uint64_t b, uint64_t c) {
  if (verb == "mov") return a;
  if (verb == "add") return a + b;
  if (verb == "sub") return a - b;
  if (verb == "and") return a & b;
  if (verb == "or") return a | b;
  if (verb == "xor") return a ^ b;
  if (verb == "not") return ~a;
  if (verb == "max") return std::max(a, b);
  if (verb == "shl") return b < 8 * static_cast<uint64_t>(width) ? a << b : 0;
  if (verb == "shr") return b < 8 * static_cast<uint64_t>(width) ? a >> b : 0;
  if (verb == "mul") return a * b;
  if (verb == "mad") return a * b + c;
  if (verb == "lop3") return a ^ b ^ c;  // table 0x96, which the parser insists on
  if (verb == "selp") return c != 0 ? a : b;
  const bool holds = verb.starts_with("setp.gt")   ? a > b
                     : verb.starts_with("setp.ge") ? a >= b
                     : verb.starts_with("setp.eq") ? a == b
                                                   : a != b;
  return holds && (!verb.ends_with(".and") || c != 0);
}

const std::vector<std::string> kVerbs = {"mov", "add", "sub", "and",  "or",   "xor", "not", "max", "shl",
                                         "shr", "mul", "mad", "lop3", "selp", "ld",  "st",  "bra", "ret"};

}  // namespace

size_t Ptx::register_named(const std::string& name) {
  const auto found = registers_.find(name);
  if (found == registers_.end()) throw std::invalid_argument("no register " + name);
  return found->second;
}

Ptx::Operand Ptx::operand(std::string word) {
  if (word.front() == '[') {
    const std::vector<std::string> parts = split(word.substr(1, word.size() - 2), '+');
    Operand address = parts[0].front() == '%' ? operand(parts[0])
                                              : Operand{Operand::kParameter, parameters_.at(parts[0]), 0};
    if (parts.size() > 1) address.number = std::stoull(parts[1], nullptr, 0);
    return address;
  }
  if (word == "%ctaid.x") return {Operand::kBlock};
  if (word == "%tid.x") return {Operand::kThread};
  if (word.front() == '%') return {Operand::kRegister, register_named(word)};
  return {Operand::kNumber, 0, std::stoull(word, nullptr, 0)};
}

Ptx::Instruction Ptx::instruction(std::string line) {
  Instruction result;
  result.line = line;
  if (line.front() == '@') {
    const size_t space = line.find(' ');
    result.guard_inverted = line[1] == '!';
    result.guard =
        operand(line.substr(result.guard_inverted ? 2 : 1, space - (result.guard_inverted ? 2 : 1)));
    line = line.substr(space + 1);
  }
  const size_t space = line.find(' ');
  const std::vector<std::string> words = split(line.substr(0, space), '.');
  result.verb = words[0];
  if (words.back().ends_with("64")) result.width = 8;
  if (words.back() == "u8") result.width = 1;
  if (words.size() > 1 && words[1] == "wide") result.width = 8;
  if (result.verb == "setp") {
    result.verb += "." + words[1] + (words[2] == "and" ? ".and" : "");
  } else if (std::find(kVerbs.begin(), kVerbs.end(), result.verb) == kVerbs.end()) {
    throw std::invalid_argument("unknown: " + line);
  }
  if (space == std::string::npos) return result;
  std::vector<std::string> operands = split(line.substr(space), ',');
  if (result.verb == "bra") {
    branches_.emplace_back(program_.size(), operands[0]);
    return result;
  }
  if (result.verb == "lop3") {
    if (operands.back() != "0x96") throw std::invalid_argument("unknown: " + line);
    operands.pop_back();
  }
  for (const std::string& word : operands) result.operands.push_back(operand(word));
  return result;
}

Ptx::Ptx(const std::string& text) {
  for (std::string& raw : split(text, '\n')) {
    std::string line = trimmed(raw);
    if (line.empty() || line == "{" || line == "}" || line.starts_with(".version") ||
        line.starts_with(".target") || line.starts_with(".address_size"))
      continue;
    if (line.starts_with(".visible .entry ")) {
      const size_t open = line.find('(');
      entry_ = line.substr(16, open - 16);
      for (const std::string& one : split(line.substr(open + 1, line.find(')') - open - 1), ',')) {
        const size_t index = parameters_.size();
        parameters_[split(one, ' ').back()] = index;
      }
      continue;
    }
    if (line.ends_with(":")) {
      labels_[line.substr(0, line.size() - 1)] = program_.size();
      continue;
    }
    if (!line.ends_with(";")) throw std::invalid_argument("unknown: " + line);
    line.pop_back();
    if (line.starts_with(".reg")) {
      for (const std::string& one : split(line.substr(line.find('%')), ',')) {
        const size_t many = one.find('<');
        const int count = many == std::string::npos ? 1 : std::stoi(one.substr(many + 1));
        for (int k = 0; k < count; ++k) {
          const size_t index = registers_.size();
          registers_[many == std::string::npos ? one : one.substr(0, many) + std::to_string(k)] = index;
        }
      }
      continue;
    }
    program_.push_back(instruction(line));
  }
  for (const auto& [at, label] : branches_) program_[at].target = labels_.at(label);
}

bool Ptx::run(uint32_t block, uint32_t threads, const std::vector<uint64_t>& arguments) const {
  std::vector<Lanes> registers(registers_.size());
  const auto value = [&](const Operand& from, uint32_t lane) -> uint64_t {
    switch (from.kind) {
      case Operand::kRegister:
        return registers[from.index][lane];
      case Operand::kBlock:
        return block;
      case Operand::kThread:
        return lane;
      case Operand::kParameter:
        return arguments[from.index];
      default:
        return from.number;
    }
  };
  for (size_t at = 0; at < program_.size(); ++at) {
    const Instruction& now = program_[at];
    if (now.verb == "ret") break;
    const auto active = [&](uint32_t lane) {
      return now.guard.kind == Operand::kNone || (value(now.guard, lane) != 0) != now.guard_inverted;
    };
    if (now.verb == "bra") {
      for (uint32_t lane = 1; lane < threads; ++lane)
        if (active(lane) != active(0)) throw std::logic_error("lanes part: " + now.line);
      if (active(0)) at = now.target - 1;
      continue;
    }
    for (uint32_t lane = 0; lane < threads; ++lane) {
      if (!active(lane)) continue;
      if (now.verb == "ld" || now.verb == "st") {
        const bool loads = now.verb == "ld";
        const Operand& place = now.operands[loads ? 1 : 0];
        if (place.kind == Operand::kParameter) {
          registers[now.operands[0].index][lane] = arguments[place.index];
          continue;
        }
        const uint64_t address = value(place, lane) + place.number;
        if (address % static_cast<uint64_t>(now.width) != 0 ||
            !reachable(address, static_cast<size_t>(now.width)))
          return false;
        if (loads)
          registers[now.operands[0].index][lane] = load(address, now.width);
        else
          __atomic_store_n(reinterpret_cast<uint32_t*>(address),
                           static_cast<uint32_t>(value(now.operands[1], lane)), __ATOMIC_RELAXED);
        continue;
      }
      uint64_t in[3] = {0, 0, 0};
      for (size_t k = 1; k < now.operands.size() && k <= 3; ++k) in[k - 1] = value(now.operands[k], lane);
      const uint64_t result = computed(now.verb, now.width, in[0], in[1], in[2]);
      registers[now.operands[0].index][lane] = now.width == 8 ? result : result & 0xFFFFFFFF;
    }
  }
  return true;
}

}  // namespace fake
