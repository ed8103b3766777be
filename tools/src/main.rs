//! The `remanent` command. Its work is done by the library, which tests call without a process.

fn main() -> std::process::ExitCode {
    remanent_tools::main()
}
