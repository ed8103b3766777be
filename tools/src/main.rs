//! The `remanent` command. All code is in the library, so that tests can run commands without starting processes.

fn main() -> std::process::ExitCode {
    remanent_tools::main()
}
